"""What a driver has done with its own MLflow is where its calls are tracked: with the real one, in its own process."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.model.spec import Tracking
from tests.support.tracking.mlflow_server import PYTHON, MlflowServer

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

RESOLVE = """
import os, sys
import msgspec
from serverless_gpu.client.mlflow_context import resolve
from serverless_gpu.model.spec import RunSpec

def told(**more):
    found = resolve(RunSpec(), {}, os.environ)
    with open(sys.argv[1], "wb") as file:
        file.write(msgspec.json.encode([found.tracking, found.sentence, more]))
"""
LIMIT_S = 120


class Told(msgspec.Struct, array_like=True):
    """What a driver wrote."""

    tracking: Tracking
    sentence: str
    more: dict[str, str]


def drive(directory: Path, program: str, **environ: str) -> Told:
    """Run a driver in a directory of its own, and return where it would be tracked."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "SGPU_"))}
    here = directory / "cwd"
    here.mkdir()
    done = subprocess.run(
        [PYTHON, "-c", RESOLVE + textwrap.dedent(program), str(directory / "told.json")],
        cwd=here,
        env={**variables, **environ},
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode((directory / "told.json").read_bytes(), type=Told)


def test_nothing_done_with_mlflow_is_nothing_said(tmp_path: Path) -> None:
    told = drive(tmp_path, "import mlflow\ntold()")
    assert (told.tracking.uri, told.tracking.store, told.tracking.parent_id, told.sentence) == ("", "", "", "")
    assert list((tmp_path / "cwd").iterdir()) == []


def test_an_active_run_in_the_default_store_is_the_parent(tmp_path: Path) -> None:
    program = "import mlflow\nwith mlflow.start_run() as run:\n    told(run_id=run.info.run_id)"
    told = drive(tmp_path, program)
    assert told.tracking.store == f"sqlite:///{tmp_path}/cwd/mlflow.db"
    assert (told.tracking.parent_id, told.tracking.experiment_id) == (told.more["run_id"], "0")
    assert (told.tracking.run_id, told.sentence) == ("", "")


def test_an_experiment_set_in_the_default_store_is_the_calls(tmp_path: Path) -> None:
    told = drive(tmp_path, "import mlflow\ntold(experiment=mlflow.set_experiment('/Team/digits').experiment_id)")
    assert told.tracking.store == f"sqlite:///{tmp_path}/cwd/mlflow.db"
    assert (told.tracking.experiment_id, told.tracking.experiment) == (told.more["experiment"], "")


def test_a_directory_is_kept_as_the_store_it_is(tmp_path: Path) -> None:
    program = "import mlflow\nmlflow.set_tracking_uri('./mlruns')\nmlflow.set_experiment('a')\ntold()"
    told = drive(tmp_path, program, MLFLOW_ALLOW_FILE_STORE="true")
    assert told.tracking.store == f"{tmp_path}/cwd/mlruns"


@pytest.mark.parametrize("place", ['os.environ["MLFLOW_TRACKING_URI"] = mlflow.get_tracking_uri()', ""])
def test_23A2_a_run_that_has_ended_is_continued_where_a_variable_says_so(tmp_path: Path, place: str) -> None:
    program = f"""
    import mlflow
    with mlflow.start_run() as run:
        pass
    os.environ["MLFLOW_RUN_ID"] = run.info.run_id
    {place}
    told(run_id=run.info.run_id)
    """
    told = drive(tmp_path, program)
    assert (told.tracking.run_id, told.tracking.parent_id) == (told.more["run_id"], "")
    assert told.tracking.store == f"sqlite:///{tmp_path}/cwd/mlflow.db"


def test_a_server_of_the_drivers_is_the_calls(tmp_path: Path, mlflow_server: MlflowServer) -> None:
    program = f"""
    import mlflow
    mlflow.set_tracking_uri({mlflow_server.uri!r})
    experiment = mlflow.set_experiment("/tests/drivers").experiment_id
    with mlflow.start_run(run_name="mine") as run:
        told(run_id=run.info.run_id, experiment=experiment)
    """
    told = drive(tmp_path, program)
    assert (told.tracking.uri, told.tracking.store) == (mlflow_server.uri, "")
    assert told.tracking.parent_id == told.more["run_id"]
    assert told.tracking.experiment_id == told.more["experiment"]
    assert list((tmp_path / "cwd").iterdir()) == []
