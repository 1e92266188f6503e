"""What a run of this machine cost: its directories say it, whole, cut off, or of an earlier version."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.ambient import new_run_id
from serverless_gpu.client.runs.local_costs import cost_here
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, FactKind, Reason
from serverless_gpu.model.receipt import Bill, Receipt, Segments
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.attempt.history import read_receipt
from serverless_gpu.node.attempt.server_attempt_record import ServerAttempt
from serverless_gpu.node.attempt.submission import Submission
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.node.uplink import attempt_controller
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden

GPUS = ("GPU-1", "GPU-2")
PRICE = Tariff(gpu_micros_per_hour=3_600_000)  # a micro for each GPU-millisecond
K = FactKind


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Attempt:
    """A directory of an attempt, as a node leaves it behind."""

    def __init__(self, run: Path, clock: FakeClock, fence: int = 1, tariff: Tariff | None = PRICE) -> None:
        self.directory = run / str(fence)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clock, self._start_ns, self._start_wall_ns = clock, clock.boottime_ns(), clock.wall_ns()
        self._gang = f"{run.name}:{fence}"
        asked = Submission(
            run_id=run.name, fence=fence, world_size=2, spec=RunSpec(), version="1", gpu_type="H100", tariff=tariff
        )
        text = msgspec.to_builtins(asked)
        if tariff is None:  # as it was written before it was said there
            del text["tariff"], text["gpu_type"]
        (self.directory / "spec.json").write_bytes(msgspec.json.encode(text))

    def facts(self, *kinds: tuple[FactKind, int]) -> None:
        """Write down what happened, each so many milliseconds after the start."""
        with (self.directory / "facts.jsonl").open("ab") as file:
            for seq, (kind, after_ms) in enumerate(kinds):
                fact = Fact(
                    attempt=self._gang,
                    seq=seq,
                    kind=kind,
                    boot_id=self._clock.boot_id(),
                    boottime_ns=self._start_ns + after_ms * 1_000_000,
                    wall_ns=self._start_wall_ns + after_ms * 1_000_000,
                    gpus=GPUS,
                    cpus=0,
                    memory_bytes=0,
                )
                file.write(msgspec.json.encode(fact) + b"\n")

    def stopped(self, reason: Reason) -> None:
        """Write down how it ended."""
        said = Stopped(state=MEANINGS[reason].state, reason=reason, cause=None, consequences=())
        (self.directory / "stopped.json").write_bytes(msgspec.json.encode(said))

    def receipt(self, *, gpu_ms: int, micros: int | None, **more: Any) -> None:
        """Write its account."""
        made = Receipt(
            run_id=self.directory.parent.name,
            fence=1,
            state="SUCCEEDED",
            reason=None,
            gpu_type="H100",
            gpus=GPUS,
            kind=DeviceKind.FAKE,
            segments=Segments(queued_ms=70, run_ms=100, gate_ms=5),
            gpu_ms=gpu_ms,
            micros=micros,
            currency="USD",
            peak_memory_bytes=None,
            warm=True,
            warm_reason="",
            gate="",
            quarantined=(),
            tags={},
            facts=5,
            world_size=2,
        )
        made = msgspec.structs.replace(made, **more)
        (self.directory / "receipt.json").write_bytes(msgspec.json.encode(made))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / new_run_id()


@pytest.fixture
def living(run: Path) -> Iterator[Path]:
    """Yield the run's directory; what looks after its first attempt holds its lock meanwhile."""
    directory = run / "1"
    directory.mkdir(parents=True)
    with (directory / "supervisor.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield run


WHOLE = ((K.RESERVED, 0), (K.STARTING, 10), (K.EXEC, 30), (K.STOPPING, 1_030), (K.EXITED, 1_040), (K.FREED, 1_050))


def test_all_attempts_count_and_those_that_the_platform_lost_cost_nothing(run: Path, clock: FakeClock) -> None:
    lost, second = Attempt(run, clock), Attempt(run, clock, fence=2)
    lost.facts(*WHOLE)
    lost.stopped(Reason.GPU_LOST)
    second.facts(*WHOLE)
    second.stopped(Reason.COMPLETED)
    assert not MEANINGS[Reason.GPU_LOST].is_billed
    cost = cost_here(run, clock)
    assert (cost.gpu_ms, cost.billed_ms, cost.micros, cost.attempts) == (2 * 2_040, 2_040, 2_040, 2)
    assert (cost.environment_ms, cost.start_ms, cost.run_ms) == (40, 80, 4_000)
    assert (cost.stop_ms, cost.gate_ms, cost.is_final, cost.gpu_type) == (40, 40, True, "H100")


def test_a_run_that_goes_on_has_used_what_it_has_by_now(living: Path, clock: FakeClock) -> None:
    Attempt(living, clock).facts((K.RESERVED, 0), (K.EXEC, 1_000))
    clock.advance(3.0)
    cost = cost_here(living, clock)
    assert (cost.gpu_ms, cost.micros, cost.is_final) == (4_000, 4_000, False)
    assert str(cost) == golden("client.costs_here.004-usd-gpu")


def test_a_receipt_is_the_last_word_while_whoever_wrote_it_ends(living: Path, clock: FakeClock) -> None:
    attempt = Attempt(living, clock)
    attempt.facts(*WHOLE)
    attempt.receipt(gpu_ms=2_040, micros=2_040)
    clock.advance(3.0)
    assert (cost_here(living, clock).gpu_ms, cost_here(living, clock).is_final) == (2_040, True)


def test_one_whose_supervisor_was_killed_has_used_what_its_last_fact_says(run: Path, clock: FakeClock) -> None:
    Attempt(run, clock).facts((K.RESERVED, 0), (K.EXEC, 1_000), (K.ALIVE, 1_500))
    clock.advance(3_600.0)
    cost = cost_here(run, clock)
    assert (cost.gpu_ms, cost.is_final) == (1_000, True)


def test_a_line_that_is_half_written_is_left_out(run: Path, clock: FakeClock) -> None:
    attempt = Attempt(run, clock)
    attempt.facts((K.RESERVED, 0), (K.EXEC, 0), (K.ALIVE, 500))
    with (attempt.directory / "facts.jsonl").open("ab") as file:
        file.write(b'{"attempt":"r:1","seq":3,"ki')
    assert cost_here(run, clock).gpu_ms == 1_000


def test_a_directory_of_an_earlier_version_costs_what_its_receipt_says(run: Path, clock: FakeClock) -> None:
    attempt = Attempt(run, clock, tariff=None)
    attempt.facts(*WHOLE)
    attempt.receipt(gpu_ms=2_040, micros=77)
    cost = cost_here(run, clock)
    assert (cost.micros, cost.gpu_ms, cost.run_ms, cost.queued_ms) == (77, 2_040, 200, 70)


def test_without_facts_the_receipt_stands(run: Path, clock: FakeClock) -> None:
    Attempt(run, clock).receipt(gpu_ms=9, micros=None)
    cost = cost_here(run, clock)
    assert (cost.micros, cost.gpu_ms, cost.unpriced_ms) == (None, 9, 9)


def test_without_facts_what_the_receipt_says_of_its_bill_stands(run: Path, clock: FakeClock) -> None:
    Attempt(run, clock).receipt(gpu_ms=9, micros=0, bill=Bill(billed_ms=4, dbu_micros=3, unbilled="it was lost"))
    cost = cost_here(run, clock)
    assert (cost.gpu_ms, cost.billed_ms, cost.dbu_micros, cost.idle_ms) == (9, 4, 3, 0)
    assert "not billed" in cost.rows()
    Attempt(run, clock).receipt(gpu_ms=9, micros=0, runs=2, segments=Segments())
    assert cost_here(run, clock).idle_ms == 9


def test_a_receipt_that_is_made_afterwards_has_the_price_of_the_launch(run: Path, clock: FakeClock) -> None:
    """An older server says no tariff, and the node's own prices hold."""
    attempt = Attempt(run, clock)
    attempt.facts((K.RESERVED, 0), (K.EXEC, 1_000), (K.ALIVE, 1_500))
    remote = ServerAttempt(
        run_id=run.name,
        fence=1,
        profile="",
        token="t",
        gpu_type="H100",
        world_size=2,
        partition_grace_s=1.0,
    )
    attempt_controller.settle_orphan(attempt.directory, remote, "", clock)
    receipt = read_receipt(attempt.directory)
    assert receipt is not None and receipt.micros == cost_here(run, clock).micros == 1_000
    assert receipt.bill is not None and receipt.bill.billed_ms == 1_000  # nothing shows that the machine failed


def test_what_never_got_devices_used_nothing(run: Path, tmp_path: Path, clock: FakeClock) -> None:
    assert cost_here(tmp_path / "nowhere", clock).text() == golden("server.costing.nothing-used-so")
    Attempt(run, clock)
    assert cost_here(run, clock).gpu_ms == 0
