"""One real MLflow server for all tests of tracking.

MLflow is not in the environment of the tests: it is in that of the user, `.venv/mlflow`, where their ranks and drivers
run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.tracking.bare import BareRanks
from tests.support.tracking.mlflow_server import PYTHON, MlflowServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here that asks for the server as what it is: heavy."""
    for item in items:
        if "tests/e2e/tracking/" in item.nodeid and "mlflow_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.heavy)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def mlflow_server() -> Iterator[MlflowServer]:
    """Yield a server that answers; tests make experiments of their own in it."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is not there: `make test-all` makes it")
    directory = Path(tempfile.mkdtemp(prefix="sg-mlflow-", dir="/tmp"))
    server = MlflowServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def bare(mlflow_server: MlflowServer, tmp_path: Path, request: pytest.FixtureRequest) -> BareRanks:
    """Return ranks without a node around them, and an MLflow run that is to be theirs."""
    return BareRanks(tmp_path, mlflow_server, experiment=f"/tests/{request.node.name}")
