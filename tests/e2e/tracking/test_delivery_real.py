"""Our own writing against a real MLflow server: it takes what we send, and does once what it was asked for twice.

And the other way round: MLflow's own client against the fake of `serverless_gpu.testing.mlflow`, which others trust.
"""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.spec import Tracking
from serverless_gpu.model.tracking_rules import valid_key
from serverless_gpu.testing.mlflow import FakeMlflow
from serverless_gpu.tracking.base import Metric, TrackerAway, TrackerRefused
from serverless_gpu.tracking.mlflow import MlflowTracker
from tests.support.tracking.deliveries import CPU, RUN_ID, attempt, delivered, delivering, job, record, until
from tests.support.tracking.mlflow_server import PYTHON, MlflowServer, without_mlflow_variables

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["real", "fake"])
def server(request: pytest.FixtureRequest, mlflow_server: MlflowServer) -> Iterator[str]:
    """Yield the address of a real server, then of ours."""
    if request.param == "real":
        yield mlflow_server.uri
        return
    with FakeMlflow() as fake:
        yield fake.uri


@pytest.fixture
def tracker(server: str) -> Iterator[MlflowTracker]:
    with closing(MlflowTracker(server, {})) as tracker:
        yield tracker


def tracking(request: pytest.FixtureRequest, *, experiment: str = "", run_id: str = "") -> Tracking:
    name = experiment or f"/tests/{request.node.name}"
    return Tracking(experiment=name, run_id=run_id, run_name=f"jobTaskRun-{RUN_ID}")


def test_a_run_of_two_attempts_and_two_nodes_is_one_mlflow_run(
    tmp_path: Path, mlflow_server: MlflowServer, request: pytest.FixtureRequest
) -> None:
    where = tracking(request)
    first, other, second = attempt(tmp_path / "a"), attempt(tmp_path / "b"), attempt(tmp_path / "a", 2)
    record(first, range(1, 26))
    record(other, range(1, 26), node_rank=1)
    (first / "failures" / "0.stack").write_text("File train.py, line 3 in train\n")
    for directory, what, state in (
        (first, job(where, num_nodes=2), State.CANCELLED),
        (other, job(where, node_rank=1, num_nodes=2), State.CANCELLED),
        (second, job(where, fence=2), State.SUCCEEDED),
    ):
        (directory / "receipt.json").write_text("{}")
        with delivering(directory, MlflowTracker(mlflow_server.uri, {}), what) as (delivery, heard):
            delivery.ending(state, Reason.COMPLETED if state is State.SUCCEEDED else Reason.PREEMPTED)
            delivery.settled()
            delivered(delivery)
        assert (delivery.over, heard.problems, heard.sentences) == ("delivered", [], [])
    (run,) = mlflow_server.runs(where.experiment)
    assert (run.status, run.name) == ("FINISHED", f"jobTaskRun-{RUN_ID}")
    assert mlflow_server.history(run.run_id, CPU) == [(1, 1.0), (11, 6.5), (21, 16.5), (25, 23.5)]
    other_key = CPU.replace("node_0", "node_1")
    assert mlflow_server.history(run.run_id, other_key) == mlflow_server.history(run.run_id, CPU)
    files = {
        file["path"]
        for folder in ("sgpu", "sgpu/failures", "sgpu/attempt_2", "sgpu/node_1")
        for file in mlflow_server.get("artifacts/list", run_id=run.run_id, path=folder).get("files", [])
        if not file["is_dir"]
    }
    assert files >= {
        *("sgpu/spec.json", "sgpu/environment.json", "sgpu/_air.py", "sgpu/receipt.json"),
        *("sgpu/failures/0.txt", "sgpu/attempt_2/spec.json"),
    }
    assert {"team": "search", "sgpu.run_id": RUN_ID, "sgpu.attempt": "2"}.items() <= run.tags.items()
    with urllib.request.urlopen(heard.runs[0].url, timeout=30) as page:
        assert page.status == 200


def test_F44_a_real_server_that_stops_and_goes_on_has_one_run_with_every_point_once(
    tmp_path: Path, mlflow_server: MlflowServer, request: pytest.FixtureRequest
) -> None:
    where = tracking(request)
    directory = attempt(tmp_path)
    record(directory, range(1, 12))
    with mlflow_server.standing_still():
        what = job(where)
        with delivering(directory, MlflowTracker(mlflow_server.uri, {}), what) as (delivery, heard):
            until(delivery, lambda: heard.problems, "that it is away")
    with delivering(directory, MlflowTracker(mlflow_server.uri, {}), what) as (delivery, heard):
        until(delivery, lambda: heard.runs, "the run")
        run_id = heard.runs[0].run_id
        until(delivery, lambda: len(mlflow_server.history(run_id, CPU)) == 2, "two points")
        with mlflow_server.standing_still():
            record(directory, range(12, 46), first=False)
            until(delivery, lambda: heard.sentences, "that it is away")
        delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
        delivery.settled()
        delivered(delivery)
    (run,) = mlflow_server.runs(where.experiment)
    assert run.status == "FINISHED"
    whole = [(1, 1.0), (11, 6.5), (21, 16.5), (31, 26.5), (41, 36.5), (45, 43.5)]
    assert mlflow_server.history(run.run_id, CPU) == whole


def test_what_mlflow_refuses_the_fake_refuses(tracker: MlflowTracker, request: pytest.FixtureRequest) -> None:
    tracked = tracker.begin(tracking(request), RUN_ID, tags={}, at_ms=1)
    tracker.log(tracked, params={"lr": "1"})
    tracker.log(tracked, params={"lr": "1"}, tags={"t": "1"}, metrics=[Metric("m", 1.0, 1, 1)] * 2)
    tracker.log(tracked, tags={"t": "2"})
    for name, value in (("a=b", "x"), ("a//b", "x"), ("../a", "x"), ("k" * 251, "x"), ("lr", "2")):
        with _refused(name):
            tracker.log(tracked, params={name: value})
    for name in ("a=b", "/a", "a/../b", "a\nb"):
        with _refused(name):
            tracker.log(tracked, metrics=[Metric(name, 1.0, 1, 1)])
    with _refused("a continued run that is not there"):
        tracker.begin(tracking(request, run_id="f" * 32), RUN_ID, tags={}, at_ms=1)
    with _refused("a name that leads elsewhere"):
        tracker.upload(tracked, "a#b", b"")
    with _refused("an experiment that is not there"):
        tracker.begin(Tracking(experiment_id="123456"), RUN_ID, tags={}, at_ms=1)


def test_what_our_rules_let_through_mlflow_takes(tracker: MlflowTracker, request: pytest.FixtureRequest) -> None:
    tracked = tracker.begin(tracking(request), RUN_ID, tags={"sgpu.run_id": RUN_ID}, at_ms=1)
    names = [valid_key(name) for name in ("a=b", "a//b", "../a", "k" * 300, "", "β x:y-z", "n\nl", "x/./y/", "日本")]
    tracker.log(
        tracked,
        params=dict.fromkeys(names, "v" * 6000),
        tags=dict.fromkeys(names, "ü" * 8000),
        metrics=[Metric(name, 1e300, 1, 2**40) for name in names],
    )
    tracker.upload(tracked, "sgpu/ü b?/x.txt", b"")
    assert tracker.find(tracking(request), RUN_ID) == tracked
    assert tracker.find(tracking(request, experiment="/tests/none"), RUN_ID) is None
    assert tracker.find(tracking(request), "01other") is None


@pytest.mark.heavy
@pytest.mark.slow
def test_mlflows_own_client_can_use_the_fake(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import mlflow\n"
        "mlflow.set_experiment('/tests/client')\n"
        "with mlflow.start_run(run_name='mine', tags={'a': 'b'}) as run:\n"
        "    mlflow.log_param('lr', 0.1)\n"
        "    mlflow.log_params({'x': 1, 'y': 2})\n"
        "    mlflow.log_metric('loss', 0.5, step=3)\n"
        "    mlflow.log_metrics({'loss': 0.25}, step=4)\n"
        "    mlflow.log_text('hello', 'notes/0.txt')\n"
        "print(mlflow.get_run(run.info.run_id).data.metrics)\n"
    )
    with FakeMlflow() as fake:
        environ = {**without_mlflow_variables(), "MLFLOW_TRACKING_URI": fake.uri}
        done = subprocess.run(
            [PYTHON, program], env=environ, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        (run,) = fake.runs
    assert "{'loss': 0.25}" in done.stdout
    assert (run.name, run.status, run.params) == ("mine", "FINISHED", {"lr": "0.1", "x": "1", "y": "2"})
    assert run.series("loss") == [(3, 0.5), (4, 0.25)]
    assert run.files == {"notes/0.txt": b"hello"}


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except TrackerRefused:
        return
    except TrackerAway as error:
        raise AssertionError(f"{what!r} was not refused, but: {error}") from error
    raise AssertionError(f"{what!r} was taken")
