"""The home's MLflow server and those of callers' own stores, with a real MLflow."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.mlflow_server.server import (
    ServerFiles,
    ensure_server,
    look,
    place_of,
    stop_server,
    stop_servers,
)
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.tracking.mlflow_server import PYTHON, READY_S, without_mlflow_variables

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(600)]

_WRITES = """
import mlflow
mlflow.set_experiment("ours")
with mlflow.start_run() as run:
    mlflow.log_metric("loss", 0.5)
    mlflow.log_text("hello", "greeting.txt")
print(run.info.run_id)
"""

_READS = """
import sys, mlflow
run = mlflow.get_run(sys.argv[1])
print(run.data.metrics["loss"], mlflow.artifacts.load_text(f"{run.info.artifact_uri}/greeting.txt"))
"""


@pytest.fixture
def there(home: Path) -> Iterator[Home]:
    """Yield the home, whose MLflow servers are ended with the test."""
    yield Home(home)
    stop_servers(Home(home))


def ready(home: Home, store: str = "") -> str:
    """Return the address of a server once it answers."""

    def look_again() -> str:
        serving = ensure_server(home, str(PYTHON), store, environ=os.environ)
        assert not serving.problem, serving.problem
        return serving.uri if serving.ready else ""

    return wait_for(look_again, "MLflow's server answers", limit_s=READY_S)


def user(program: str, uri: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run a program of a user; return what it wrote."""
    environ = {**without_mlflow_variables(), "MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(
        [PYTHON, "-c", program, *arguments],
        env=environ,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def ended(place: ServerFiles, version: str) -> None:
    """End a server and let its database be another version's."""
    stop_server(place)
    with sqlite3.connect(place.directory / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = ?", (version,))
    database.close()


def test_what_was_tracked_is_there_after_a_restart_at_the_same_address(there: Home) -> None:
    uri = ready(there)
    place = place_of(there)
    run_id = user(_WRITES, uri)
    assert list((place.directory / "artifacts").rglob("greeting.txt"))
    found = look(place, SystemClock())
    assert found.version.startswith("3.")
    children = Path(f"/proc/{place.noted().keeper}/task/{place.noted().keeper}/children").read_text().split()
    assert children == [str(found.pid)]
    assert not Path(f"/proc/{found.pid}/task/{found.pid}/children").read_text()
    stop_server(place)
    assert ready(there) == uri
    assert user(_READS, uri, run_id) == "0.5 hello"


def test_a_database_of_another_mlflow_is_said_and_left_as_it_is(there: Home) -> None:
    ready(there)
    place = place_of(there)
    ended(place, "451aebb31d03")
    assert not ensure_server(there, str(PYTHON), environ=os.environ, now=True).problem
    said = wait_for(
        lambda: ensure_server(there, str(PYTHON), environ=os.environ).problem, "what is wrong", limit_s=READY_S
    )
    assert golden("tracking.home_server.written-another-version") in said


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_a_store_of_the_callers_is_as_it_was_with_the_server_and_without(
    there: Home, tmp_path: Path, kind: str
) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db" if kind == "sqlite" else str(tmp_path / "mlruns")
    before = user(_WRITES, store, cwd=tmp_path)
    uri = ready(there, store)
    assert user(_READS, uri, before) == "0.5 hello"
    through = user(_WRITES, uri, cwd=there.root)
    assert len(list((tmp_path / "mlruns").rglob("greeting.txt"))) == 2
    stop_servers(there)
    assert user(_READS, store, through, cwd=there.root) == "0.5 hello"
