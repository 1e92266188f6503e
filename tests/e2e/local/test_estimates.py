"""When would this call start? On this machine: who has its devices, and until when at the latest."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import pytest

from serverless_gpu import Run, distributed
from serverless_gpu.client.estimating import Estimate
from serverless_gpu.errors import ArgumentMismatch, NotEnoughGpus, NotPicklable
from serverless_gpu.model.scheduling.duration_estimates import LEAVING_S
from tests.support.golden import golden
from tests.support.local.observe import wait_for


@distributed(gpus=6, gpu_type="H100")
def wide(value: object) -> object:
    """Return what it is given."""
    return value


@distributed(gpus=3, gpu_type="H100", timeout=120, grace=1, quiet=True)
def limited(done: str) -> None:
    """Wait until it may end."""
    wait_for(Path(done).exists, "the test is over", limit_s=60)


@distributed(gpus=1, gpu_type="H100", quiet=True)
def endless(done: str) -> None:
    """Wait until it may end."""
    wait_for(Path(done).exists, "the test is over", limit_s=60)


def running(run: Run[None]) -> Run[None]:
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    return run


def test_what_is_free_starts_at_once_and_nothing_was_started(warm: Path) -> None:
    before = sorted(path.name for path in (warm / "runs").glob("*"))
    now = datetime.now(UTC)
    found = wide.estimate(1)
    assert (found.seconds, found.place, found.basis) == (0.0, 0, golden("local.estimates.h100-free"))
    assert found.start is not None and found.start.tzinfo is not None and (found.start - now).total_seconds() < 60
    assert str(found) == golden("local.estimates.once-machine-h100")
    assert sorted(path.name for path in (warm / "runs").glob("*")) == before


@pytest.mark.slow
def test_what_waits_for_a_time_limit_starts_then_at_the_latest(warm: Path, tmp_path: Path) -> None:
    done = str(tmp_path / "done")
    run = running(limited.submit(done))
    try:
        found = wide.estimate(1)
        # Its time limit, its grace, and what it takes to be gone: as the server counts.
        assert found.is_bound and found.seconds is not None and 120 < found.seconds <= 121 + LEAVING_S
        assert golden("local.estimates.free-machine") in found.basis and "/limited holds 3 until " in found.basis
        other = running(endless.submit(done))
        unbound = wide.estimate(1)
        assert (unbound.start, unbound.is_bound) == (found.start, True)  # one of the three that end is enough
        assert distributed(gpus=8, gpu_type="H100")(wide.__wrapped__).estimate(1).seconds is None
    finally:
        Path(done).touch()
    assert run.wait(50) and other.wait(50)


@pytest.mark.slow
def test_what_earlier_runs_took_is_expected_of_the_next(own: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    done.touch()
    for _ in range(2):
        endless.submit(str(done)).receipt(50)
    whole = distributed(gpus=8, gpu_type="H100")(wide.__wrapped__)

    def while_one_runs() -> Estimate:
        done.unlink()
        run = running(endless.submit(str(done)))
        found = whole.estimate(1)
        done.touch()
        run.receipt(50)  # from it others learn
        return found

    assert while_one_runs().seconds is None  # after two, nobody can say
    found = while_one_runs()
    assert (
        found.seconds is not None
        and not found.is_bound
        and golden("local.estimates.endless-holds-until") in found.basis
    )


@pytest.mark.slow
def test_who_is_behind_others_is_told_that_nobody_can_say(warm: Path, tmp_path: Path) -> None:
    done = str(tmp_path / "done")
    run = running(limited.submit(done))
    waiting = wide.submit(1)
    wait_for(lambda: bool(waiting.waiting_for()), "it waits")
    try:
        found = wide.estimate(1)
        assert (found.seconds, found.place) == (None, 2)
        assert found.basis.endswith("1 run is ahead in the queue")
        narrow = distributed(gpus=1, gpu_type="H100")(wide.__wrapped__).estimate(1)
        assert (narrow.seconds, narrow.place) == (None, 2)  # five are free, and whoever came first is served first
        assert str(found).startswith("unknown: needs 6 H100 on one node; 5 free on this machine; ")
    finally:
        Path(done).touch()
    assert run.wait(50) and waiting.result() == 1


@pytest.mark.slow
def test_what_a_call_would_cost_rests_on_the_prices_of_this_home_and_on_its_time_limit(own: Path) -> None:
    unpriced = wide.estimate(1).cost
    assert unpriced is not None and unpriced.micros_per_hour is None and "[prices] of config.toml" in unpriced.basis
    (own / "config.toml").write_text("[prices]\nH100 = 2.99\n")
    found = distributed(gpus=6, gpu_type="H100", timeout=600)(wide.__wrapped__).estimate(1)
    assert found.cost is not None and found.cost.at_timeout_micros == 2_990_000
    assert str(found).splitlines() == [
        golden("local.estimates.once-machine-h100"),
        golden("local.estimates.most-99-usd"),
    ]


class Stubborn:
    """Something that cannot travel."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("not me")


def test_what_would_refuse_the_call_refuses_the_question(warm: Path) -> None:
    with pytest.raises(ArgumentMismatch, match="missing value"):
        wide.estimate()  # type: ignore[call-arg]  # that is the point
    with pytest.raises(NotPicklable, match="not me"):
        wide.estimate(Stubborn())
    with pytest.raises(NotPicklable):
        wide.estimate(threading.Lock())
    with pytest.raises(NotEnoughGpus):
        distributed(gpus=9, gpu_type="H100")(wide.__wrapped__).estimate(1)


def test_an_estimate_says_what_it_knows_in_words() -> None:
    assert str(Estimate(start=None, seconds=None, basis="bob has it")) == golden("local.estimates.unknown-bob")
    assert str(Estimate(start=None, seconds=None, basis="no node has it", impossible=True)) == golden(
        "local.estimates.never-node"
    )
