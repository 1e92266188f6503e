"""What the monitor keeps on disk of attempts that MLflow still has to hear of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serverless_gpu.model.spec import RunSpec, Tracking
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.monitor import backlog
from serverless_gpu.node.monitor.backlog import Backlog, ClaimedAttempt
from serverless_gpu.node.monitor.delivery import AttemptDelivery
from serverless_gpu.node.monitor.messages import Observe, Prepare
from serverless_gpu.node.monitor.process import MlflowDeliveries
from serverless_gpu.testing import FakeClock

_WEEK_S = 7 * 24 * 3600


def observe(tmp_path: Path, run_id: str = "run-a", **environ: str) -> Observe:
    """Return an attempt, whose directory is there."""
    directory = tmp_path / run_id
    directory.mkdir(exist_ok=True)
    spec = RunSpec(tracker=Tracking(uri="http://mlflow.example"))
    return Observe(
        run_id=run_id,
        fence=1,
        directory=str(directory),
        spec=spec,
        world_size=1,
        python="python3",
        environ=environ,
        called_ns=1,
    )


@pytest.fixture
def kept(tmp_path: Path) -> Backlog:
    """Return a backlog."""
    return Backlog(tmp_path / "tracking", FakeClock())


def test_what_one_process_holds_no_other_takes_until_it_leaves_it(tmp_path: Path, kept: Backlog) -> None:
    held = kept.keep(observe(tmp_path), 7)
    assert held is not None
    other = Backlog(tmp_path / "tracking", FakeClock())
    assert list(other.take(frozenset(), 9)) == [] and other.keep(observe(tmp_path), 8) is None
    held.leave()
    ((found, again),) = other.take(frozenset(), 9)
    assert (found.observe.run_id, found.origin_ns) == ("run-a", 7)
    again.drop()
    assert os.listdir(tmp_path / "tracking") == []


def test_oldest_first_no_more_than_asked_and_none_that_is_known(tmp_path: Path, kept: Backlog) -> None:
    for name in ("run-c", "run-a", "run-b"):
        held = kept.keep(observe(tmp_path, name), 1)
        assert held is not None
        held.leave()
    taken = list(kept.take(frozenset({"run-a.1.0"}), 1))
    assert [one.observe.run_id for one, _ in taken] == ["run-b"]
    taken[0][1].leave()


def test_no_credentials_are_kept_only_that_there_were_some(tmp_path: Path, kept: Backlog) -> None:
    held = kept.keep(
        observe(
            tmp_path,
            MLFLOW_TRACKING_URI="https://me:s3cret@mlflow.example",
            MLFLOW_TRACKING_TOKEN="s3cret",
            HTTPS_PROXY="http://me:s3cret@proxy",
            HTTP_PROXY="http://proxy",
            MLFLOW_S3_KEY="s3cret",
        ),
        1,
    )
    assert held is not None
    assert b"s3cret" not in held.path.read_bytes()
    held.leave()
    ((found, held),) = kept.take(frozenset(), 1)
    assert found.has_secrets
    assert found.observe.environ == {"MLFLOW_TRACKING_URI": "https://mlflow.example", "HTTP_PROXY": "http://proxy"}
    held.leave()


def test_an_attempt_whose_directory_was_deleted_is_forgotten(tmp_path: Path, kept: Backlog) -> None:
    held = kept.keep(observe(tmp_path), 1)
    assert held is not None
    held.leave()
    (tmp_path / "run-a").rmdir()
    assert list(kept.take(frozenset(), 1)) == [] and os.listdir(tmp_path / "tracking") == []


def test_what_cannot_be_read_stays_for_a_week(tmp_path: Path) -> None:
    clock = FakeClock()
    path = tmp_path / "tracking" / "run-a.1.0.json"
    path.parent.mkdir()
    path.write_text("{")
    os.utime(path, ns=(clock.wall_ns(), clock.wall_ns()))
    assert list(Backlog(path.parent, clock).take(frozenset(), 1)) == [] and path.exists()
    clock.advance(_WEEK_S + 1)
    assert list(Backlog(path.parent, clock).take(frozenset(), 1)) == [] and not path.exists()


def test_there_are_never_more_than_a_bound(tmp_path: Path, kept: Backlog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "KEPT_MAX", 2)
    for name in ("run-a", "run-b", "run-c"):
        held = kept.keep(observe(tmp_path, name), 1)
        assert held is not None
        held.leave()
    for one, held in kept.take(frozenset(), 0):
        raise AssertionError(one, held)
    assert sorted(os.listdir(tmp_path / "tracking")) == ["run-b.1.0.json", "run-c.1.0.json"]


def test_a_disk_that_takes_nothing_costs_only_the_memory_of_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Backlog(tmp_path / "file" / "tracking", FakeClock()).keep(observe(tmp_path), 1) is None


def test_those_that_wait_for_something_do_not_keep_others_from_being_taken(tmp_path: Path, kept: Backlog) -> None:
    for name in ("run-a", "run-b", "run-c"):
        held = kept.keep(observe(tmp_path, name), 1)
        assert held is not None
        held.leave()
    taken = list(kept.take(frozenset(), 1, lambda one: one.observe.run_id == "run-c"))
    assert [one.observe.run_id for one, _ in taken] == ["run-c"]
    taken[0][1].leave()
    assert len(os.listdir(tmp_path / "tracking")) == 3


def test_attempts_without_their_credentials_are_looked_at_once_and_again_when_somebody_brings_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, clock = Home(tmp_path), FakeClock()
    held = Backlog(home.tracking, clock).keep(observe(tmp_path, MLFLOW_TRACKING_TOKEN="s3cret"), 1)
    assert held is not None
    held.leave()
    looks: list[Path] = []
    hold = backlog.hold_kept

    def looked(path: Path) -> ClaimedAttempt | None:
        looks.append(path)
        return hold(path)

    monkeypatch.setattr(backlog, "hold_kept", looked)
    monkeypatch.setattr(AttemptDelivery, "start", lambda delivery: None)
    deliveries = MlflowDeliveries(home, clock, lambda: None)
    for _ in range(3):
        assert list(deliveries.tend({})) == []
        clock.advance(60)
    assert len(looks) == 1
    environ = {"MLFLOW_TRACKING_TOKEN": "s3cret", "MLFLOW_TRACKING_URI": "http://mlflow.example"}
    deliveries.prepare(Prepare(tracker=Tracking(uri="http://mlflow.example"), python="python3", environ=environ))
    (recorder,) = deliveries.tend({})
    assert recorder.delivery is not None and recorder.delivery.held is not None
    recorder.delivery.held.leave()
