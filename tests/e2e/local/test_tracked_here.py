"""Runs of this machine and an MLflow that misbehaves: runs do not notice, and what was missed arrives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import Run, distributed
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.mlflow import job
from serverless_gpu.node.monitor import start_stop
from serverless_gpu.ray import ray_launch
from serverless_gpu.testing import stop_agent
from serverless_gpu.testing.mlflow import Behaviour, FakeMlflow, FakeRun
from tests.support.local import fake_ray
from tests.support.local.monitor import monitor
from tests.support.local.observe import announced, nothing_of_a_run, supervisor, wait_for
from tests.support.local.ranks import stay

_SECRET = "open-sesame"


@pytest.fixture
def mlflow(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMlflow]:
    """Yield an MLflow server that this process's calls are tracked in, as if its environment had an MLflow."""
    package = tmp_path / "environment" / "mlflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    assert "mlflow" not in sys.modules
    with FakeMlflow() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", _SECRET)
        yield server
        stop_agent(own)


def variables() -> dict[str, str]:
    """Return a rank's variables of MLflow."""
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}


def undelivered(home: Path) -> list[str]:
    """Return the attempts that MLflow still has to hear of."""
    directory = Home(home).tracking
    return os.listdir(directory) if directory.exists() else []


def arrived(mlflow: FakeMlflow, run: Run[int]) -> FakeRun:
    """Wait until everything of a run is in MLflow, and return it."""

    def has_all(server: FakeMlflow) -> bool:
        found = [one for one in server.runs if one.tags.get("sgpu.run_id") == run.id]
        return bool(found) and found[0].status != "RUNNING" and any(n.endswith("receipt.json") for n in found[0].files)

    mlflow.wait(has_all, 60)
    return mlflow.run_of(run.id)


def went_on(mlflow: FakeMlflow, home: Path, where: str) -> Run[int]:
    """Run two ranks that stay until they have been sampled, and return the run, which has succeeded."""
    run: Run[int] = distributed(gpus=2, quiet=True)(stay).submit(where)
    sampled(run)
    (Path(where) / "go").touch()
    assert run.results(timeout=60) == [0, 1]
    return run


def sampled(run: Run[int], rows: int = 2) -> None:
    """Wait until a run has been sampled."""
    path = Path(run.directory, "logs", "0.telemetry")
    wait_for(lambda: path.exists() and len(path.read_bytes().splitlines()) > rows, "it was sampled")


def test_a_run_is_in_mlflow_with_its_samples_and_its_ranks_know_where(
    mlflow: FakeMlflow, own: Path, where: str
) -> None:
    run = went_on(mlflow, own, where)
    found = arrived(mlflow, run)
    assert found.status == "FINISHED"
    assert {point.key.split("/")[1] for point in found.points} == {"node_0"}
    assert found.series("system/node_0/gpu_1_memory_usage_megabytes")
    other = distributed(gpus=1, quiet=True)(variables).submit()
    assert other.results()[0]["MLFLOW_TRACKING_URI"] == mlflow.uri
    tracked = wait_for(other.tracked, "it is known where a run is that was over at once")
    assert tracked is not None and tracked.run_id in {one.run_id for one in mlflow.runs} - {found.run_id}
    wait_for(lambda: not undelivered(own), "nothing waits to be delivered")


def test_a_run_that_is_over_before_there_is_a_monitor_arrives(
    mlflow: FakeMlflow, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")  # without it a run waits for the next one that has it
    first: Run[int] = distributed(gpus=1, quiet=True)(len).submit("ab")
    assert first.results(timeout=60) == [2]
    assert arrived(mlflow, first).tags["sgpu.state"] == "SUCCEEDED"
    monitor(Home(own)).kill()
    second: Run[int] = distributed(gpus=1, quiet=True)(len).submit("ab")
    assert second.results(timeout=60) == [2]
    assert arrived(mlflow, second).tags["sgpu.state"] == "SUCCEEDED"


def test_no_credentials_are_written_down(mlflow: FakeMlflow, own: Path, where: str) -> None:
    mlflow.behave("refuses")
    went_on(mlflow, own, where)
    wait_for(lambda: undelivered(own), "it waits to be delivered")
    # What an attempt holds back for a full disk is empty, and goes with its receipt, at any moment.
    wait_for(lambda: nothing_of_a_run(own), "the run has written everything")
    written = [path for path in own.rglob("*") if path.is_file() and path.parent.name != ".reserve"]
    assert any(path.name == "tracking.json" for path in written)
    assert [path for path in written if _SECRET.encode() in content(path)] == []


def content(path: Path) -> bytes:
    """Return what is in a file; nothing if it was replaced while it was to be read."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


@pytest.mark.parametrize(
    "behaviour",
    ["refuses", "hangs", *(pytest.param(behaviour, marks=pytest.mark.long) for behaviour in ("fails", "loses"))],
)
def test_F44_a_run_succeeds_while_mlflow_is_away_and_arrives_when_it_is_back(
    mlflow: FakeMlflow, own: Path, where: str, behaviour: Behaviour
) -> None:
    distributed(gpus=1, quiet=True)(len).distributed("ab")  # it has answered before
    mlflow.behave(behaviour)
    run = went_on(mlflow, own, where)
    note = Path(run.directory, "tracking.json")
    wait_for(lambda: note.exists() and json.loads(note.read_text())["state"] == "away", "ranks are told not to wait")
    mlflow.behave("answers")
    found = arrived(mlflow, run)
    assert json.loads(note.read_text())["state"] == "ready"
    assert found.status == "FINISHED" and found.series("system/node_0/cpu_utilization_percentage")


def test_F44_mlflow_goes_away_in_the_middle_and_nothing_is_missing_or_twice(
    mlflow: FakeMlflow, own: Path, where: str
) -> None:
    run: Run[int] = distributed(gpus=2, quiet=True)(stay).submit(where)
    sampled(run)
    mlflow.wait(lambda server: bool(server.runs and server.runs[0].points))
    mlflow.behave("hangs")
    path = Path(run.directory, "logs", "0.telemetry")
    sampled(run, len(path.read_bytes().splitlines()) + 2)
    (Path(where) / "go").touch()
    assert run.results(timeout=60) == [0, 1]
    mlflow.behave("answers")
    series = arrived(mlflow, run).series("system/node_0/gpu_0_memory_usage_megabytes")
    assert series == sorted(set(series))


def test_F44_the_monitor_is_killed_and_the_next_one_goes_on(mlflow: FakeMlflow, own: Path, where: str) -> None:
    run: Run[int] = distributed(gpus=2, quiet=True)(stay).submit(where)
    sampled(run)
    mlflow.wait(lambda server: bool(server.runs))
    first = monitor(Home(own))
    first.kill()
    path = Path(run.directory, "logs", "0.telemetry")
    rows = len(path.read_bytes().splitlines())
    wait_for(lambda: len(path.read_bytes().splitlines()) > rows + 1, "the next monitor goes on with its file")
    (Path(where) / "go").touch()
    assert run.results(timeout=60) == [0, 1]
    found = arrived(mlflow, run)
    assert len(mlflow.runs) == 1
    steps = [step for step, _ in found.series("system/node_0/cpu_utilization_percentage")]
    assert steps == sorted(set(steps))
    assert run.receipt().uses[0].samples >= rows


def test_F44_what_a_stopped_monitor_left_is_delivered_by_the_next_one(
    mlflow: FakeMlflow, own: Path, where: str
) -> None:
    mlflow.behave("refuses")
    run = went_on(mlflow, own, where)
    wait_for(lambda: nothing_of_a_run(own), "the run has written everything")
    stop_agent(own)
    assert undelivered(own)
    mlflow.behave("answers")
    # The next call brings the credentials, which are nowhere on the disk.
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    assert arrived(mlflow, run).status == "FINISHED"
    wait_for(lambda: not undelivered(own), "nothing waits to be delivered")


def test_a_run_whose_supervisor_was_killed_has_failed_in_mlflow(mlflow: FakeMlflow, own: Path, where: str) -> None:
    run: Run[int] = distributed(gpus=2, quiet=True)(stay).submit(where)
    announced(Path(where), "rank0")
    mlflow.wait(lambda server: bool(server.runs))
    supervisor(own, run.id).kill()
    with pytest.raises(ServerlessGpuError):
        run.results(timeout=60)
    mlflow.wait(lambda server: server.run_of(run.id).status == "FAILED")


def test_a_failed_run_has_failed_in_mlflow(mlflow: FakeMlflow) -> None:
    with pytest.raises(ValueError):
        distributed(gpus=1, quiet=True)(int).distributed("x")
    mlflow.wait(lambda server: bool(server.runs) and server.runs[0].status == "FAILED")


def test_a_rank_may_learn_later_where_it_is_tracked(mlflow: FakeMlflow, own: Path, where: str) -> None:
    distributed(gpus=1, quiet=True)(len).distributed("ab")
    mlflow.behave("hangs")
    run: Run[int] = distributed(gpus=1, quiet=True)(stay).submit(where)
    path = Path(run.directory, "tracking.json")
    wait_for(lambda: path.exists() and json.loads(path.read_text())["state"] == "pending", "it is waited for")
    mlflow.behave("answers")
    wait_for(lambda: json.loads(path.read_text())["state"] == "ready", "it is known")
    assert json.loads(path.read_text())["environ"]["MLFLOW_RUN_ID"] == mlflow.run_of(run.id).run_id
    (Path(where) / "go").touch()
    assert run.results(timeout=60) == [0]


def test_a_rank_that_sees_mlflow_answer_has_the_monitor_try_again(mlflow: FakeMlflow, own: Path, where: str) -> None:
    mlflow.behave("refuses")
    run: Run[int] = distributed(gpus=1, quiet=True)(stay).submit(where)
    directory = Path(run.directory)
    note, asked = directory / "tracking.json", directory / job.ASKED
    wait_for(lambda: note.exists() and json.loads(note.read_text())["state"] == "away", "MLflow is away")
    asked.touch()
    wait_for(lambda: not asked.exists(), "the monitor has heard it")
    mlflow.behave("answers")
    asked.touch()
    wait_for(lambda: json.loads(note.read_text())["state"] == "ready", "it is known")
    (Path(where) / "go").touch()
    assert run.results(timeout=60) == [0]


def test_a_monitor_that_hangs_holds_no_run_up(mlflow: FakeMlflow, own: Path, where: str) -> None:
    distributed(gpus=1, quiet=True)(len).distributed("ab")
    process = monitor(Home(own))
    process.send(signal.SIGSTOP)
    try:
        assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    finally:
        process.send(signal.SIGCONT)
    start_stop.stop(Home(own))


def test_what_ray_starts_knows_where_the_run_is_tracked(
    mlflow: FakeMlflow, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = fake_ray.install(tmp_path)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    distributed(gpus=1, quiet=True)(len).distributed("ab")  # there is a monitor, and MLflow has answered before
    run = ray_launch(gpus=2, quiet=True)(variables).submit()
    [drivers] = run.results(60)
    workers = json.loads((run.directory / "ray" / "0" / "environ.out").read_text())
    mlflow.wait(lambda server: bool(server.runs), 60)
    assert workers["MLFLOW_RUN_ID"] == drivers["MLFLOW_RUN_ID"] == mlflow.run_of(run.id).run_id
