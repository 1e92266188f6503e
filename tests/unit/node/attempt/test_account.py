"""The account of an attempt: facts on disk as they happen, the receipt they add up to, the gate in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.model.billing.ledger import charge, lines
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import Attempt, Fact, FactKind, Limits, Phase, Reason, State
from serverless_gpu.model.receipt import Bill, Receipt, Segments
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.node.attempt.usage_account import AttemptAccount, gate_text, write_json
from serverless_gpu.node.devices.gpu_gate import Verdict
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.node.account import DEVICES, START_NS, WALL_NS, launch

BOOT = "00000000-0000-0000-0000-000000000000"
FREE = {device.uuid: Verdict(ok=True, evidence="no process, 0 MiB used (baseline 0 MiB)") for device in DEVICES}


def facts(directory: Path) -> list[Fact]:
    return [msgspec.json.decode(line, type=Fact) for line in (directory / "facts.jsonl").read_bytes().splitlines()]


def fact(seq: int, kind: FactKind, after_s: float) -> Fact:
    return Fact(
        attempt="r:2",
        seq=seq,
        kind=kind,
        boot_id=BOOT,
        boottime_ns=START_NS + round(after_s * 1e9),
        wall_ns=WALL_NS + round(after_s * 1e9),
        gpus=("FAKE-H100-0", "FAKE-H100-1"),
        cpus=0,
        memory_bytes=0,
    )


def whole_life(directory: Path, tariff: Tariff = UNPRICED) -> AttemptAccount:
    clock = FakeClock()
    account = AttemptAccount(launch(directory, tariff), clock)
    account.mark("called", START_NS)
    account.mark("asked")
    for seconds, mark, kind in (
        (0.5, "reserved", FactKind.RESERVED),
        (0.25, "stem", None),
        (0.25, "exec", FactKind.EXEC),
        (0.125, "enter", None),
        (2.0, "stopping", None),
        (0.5, "exited", FactKind.EXITED),
        (0.25, "freed", FactKind.FREED),
    ):
        clock.advance(seconds)
        if mark == "stopping":
            account.stopping(RETURNED, DEVICES)
        account.mark(mark)
        if mark == "exec":
            account.starting(DEVICES)
        if kind is not None:
            account.fact(kind, DEVICES)
    return account


ENDED = Attempt(run_id="r", fence=2, world_size=2, limits=Limits(), state=State.SUCCEEDED, reason=Reason.COMPLETED)
RETURNED = msgspec.structs.replace(ENDED, state=State.STOPPING, phase=Phase.TERMINATING, stop_ns=0, wake_ns=3 * 10**10)


def test_facts_are_on_disk_when_they_happen(tmp_path: Path) -> None:
    clock = FakeClock()
    account = AttemptAccount(launch(tmp_path), clock)
    account.fact(FactKind.RESERVED, DEVICES)
    assert facts(tmp_path) == [fact(0, FactKind.RESERVED, 0)]
    clock.advance(3)
    account.fact(FactKind.EXEC, DEVICES)
    assert facts(tmp_path) == [fact(0, FactKind.RESERVED, 0), fact(1, FactKind.EXEC, 3)]


def test_a_sign_of_life_is_written_where_nothing_else_was_for_a_minute(tmp_path: Path) -> None:
    clock = FakeClock()
    account = AttemptAccount(launch(tmp_path), clock)
    account.fact(FactKind.EXEC, DEVICES)
    for _ in range(5):
        clock.advance(30.5)
        account.alive(DEVICES)
    assert facts(tmp_path) == [
        fact(0, FactKind.EXEC, 0),
        fact(1, FactKind.ALIVE, 61),
        fact(2, FactKind.ALIVE, 122),
    ]


def test_F28_a_full_disk_costs_the_file_and_not_the_account(tmp_path: Path) -> None:
    clock = FakeClock()
    account = AttemptAccount(launch(tmp_path / "gone"), clock)
    account.fact(FactKind.EXEC, DEVICES)
    clock.advance(2)
    account.fact(FactKind.FREED, DEVICES)
    assert account.receipt(ENDED, DEVICES, FREE, ()).gpu_ms == 4_000


def test_facts_say_each_segment_as_the_receipt_does(tmp_path: Path) -> None:
    receipt = whole_life(tmp_path).receipt(ENDED, DEVICES, FREE, ())
    (line,) = lines(facts(tmp_path), UNPRICED)
    told = receipt.segments
    assert (told.environment_ms, told.start_ms, told.run_ms, told.stop_ms, told.gate_ms) == (
        line.environment_ms // 2,
        line.start_ms // 2,
        line.run_ms // 2,
        line.stop_ms // 2,
        line.gate_ms // 2,
    )
    assert receipt.gpu_ms == line.gpu_ms


def test_of_the_environment_that_was_there_before_the_devices_nothing_is_counted(tmp_path: Path) -> None:
    clock = FakeClock()
    account = AttemptAccount(launch(tmp_path), clock)
    account.mark("stem")
    clock.advance(5)
    account.fact(FactKind.RESERVED, DEVICES)
    account.mark("reserved")
    clock.advance(1)
    account.starting(DEVICES)
    assert facts(tmp_path)[-1] == fact(1, FactKind.STARTING, 5)


@pytest.mark.parametrize(
    ("reason", "phase", "grace_ms"),
    [
        (Reason.CANCELLED, Phase.TERMINATING, 30_000),
        (Reason.BUDGET, Phase.TERMINATING, 30_000),
        (Reason.NODE_PARTITIONED, Phase.TERMINATING, 30_000),
        (Reason.COMPLETED, Phase.TERMINATING, None),  # they ended by themselves, or failed: nobody asked them
        (Reason.RANK_RAISED, Phase.TERMINATING, None),
        (Reason.RUNTIME_LOST, Phase.KILLING, None),
    ],
)
def test_how_long_ranks_may_take_is_said_where_they_were_asked_to_end(
    tmp_path: Path, reason: Reason, phase: Phase, grace_ms: int | None
) -> None:
    account = AttemptAccount(launch(tmp_path), FakeClock())
    account.mark("exec")
    account.fact(FactKind.EXEC, DEVICES)
    for _ in range(2):  # it is said once
        account.stopping(msgspec.structs.replace(RETURNED, reason=reason, phase=phase), DEVICES)
    assert facts(tmp_path)[1:] == [msgspec.structs.replace(fact(1, FactKind.STOPPING, 0), grace_ms=grace_ms)]


def test_facts_are_in_order_also_where_a_device_failed_before_the_ranks_were_to_end(tmp_path: Path) -> None:
    account = AttemptAccount(launch(tmp_path), clock := FakeClock())
    account.mark("stem")
    clock.advance(1)
    account.fact(FactKind.RESERVED, DEVICES)
    account.fact(FactKind.HYDRATING, DEVICES)
    account.starting(DEVICES)
    account.mark("exec")
    account.fact(FactKind.EXEC, DEVICES)
    clock.advance(10)
    fault_ns = clock.boottime_ns()
    clock.advance(60)
    account.stopping(msgspec.structs.replace(RETURNED, reason=Reason.GPU_LOST, fault_ns=fault_ns), DEVICES)
    account.fact(FactKind.EXITED, DEVICES, fault_ns)
    written = facts(tmp_path)
    assert [each.boottime_ns for each in written] == sorted(each.boottime_ns for each in written)
    assert written[-2:] == [fact(4, FactKind.STOPPING, 11), fact(5, FactKind.EXITED, 11)]


def test_a_run_that_ends_before_its_ranks_ran_has_nothing_to_stop(tmp_path: Path) -> None:
    account = AttemptAccount(launch(tmp_path), FakeClock())
    account.fact(FactKind.RESERVED, DEVICES)
    account.stopping(msgspec.structs.replace(RETURNED, reason=Reason.CANCELLED), DEVICES)
    assert [each.kind for each in facts(tmp_path)] == [FactKind.RESERVED]


def test_a_mark_is_the_first_time(tmp_path: Path) -> None:
    clock = FakeClock()
    account = AttemptAccount(launch(tmp_path), clock)
    account.mark("exec")
    clock.advance(1)
    account.mark("exec")
    assert account.marks["exec"] == START_NS


def test_the_receipt_of_a_run(tmp_path: Path) -> None:
    account = whole_life(tmp_path, Tariff(gpu_micros_per_hour=3_600_000))
    account.peaks = {0: 100, 1: 50}
    account.warm = (True, "")
    account.notes.append("a note")
    receipt = account.receipt(ENDED, DEVICES, FREE, ())
    assert receipt == Receipt(
        run_id="r",
        fence=2,
        state="SUCCEEDED",
        reason=None,
        gpu_type="H100",
        gpus=("FAKE-H100-0", "FAKE-H100-1"),
        kind=DeviceKind.FAKE,
        segments=Segments(
            queued_ms=500,
            environment_ms=250,
            start_ms=250,
            first_line_ms=1125,
            run_ms=2125,
            stop_ms=500,
            gate_ms=250,
        ),
        gpu_ms=2 * 2875,
        micros=2 * 2875,
        currency="USD",
        peak_memory_bytes=150,
        warm=True,
        warm_reason="",
        gate="2 GPUs verified free: no process, 0 MiB used (baseline 0 MiB)",
        quarantined=(),
        tags={"team": "search"},
        facts=6,
        world_size=2,
        notes=("a note",),
        bill=Bill(billed_ms=2 * 2875),
    )
    assert msgspec.json.decode((tmp_path / "receipt.json").read_bytes(), type=Receipt) == receipt


@pytest.mark.parametrize(("fence", "first_line_ms"), [(1, 21_000), (2, 1_000)])
def test_the_first_line_of_a_later_attempt_is_counted_since_it_came_to_its_node(
    tmp_path: Path, fence: int, first_line_ms: int
) -> None:
    clock = FakeClock()
    asked = msgspec.structs.replace(launch(tmp_path), fence=fence, called_ns=START_NS - 20 * 10**9)
    account = AttemptAccount(asked, clock)
    account.mark("asked")
    clock.advance(1)
    account.mark("enter")
    assert account.receipt(ENDED, DEVICES, FREE, ()).segments.first_line_ms == first_line_ms


def test_waiting_for_the_callers_word_is_time_of_the_environment(tmp_path: Path) -> None:
    clock = FakeClock()
    account = AttemptAccount(launch(tmp_path), clock)
    for seconds, mark in ((0.1, "stem"), (0.1, "reserved"), (0.3, "confirmed"), (0.05, "exec")):
        clock.advance(seconds)
        account.mark(mark)
    attempt = Attempt(run_id="r", fence=2, world_size=2, limits=Limits(), state=State.SUCCEEDED)
    account.environment = "snapshot 0123456789ab, 3 units, overlay"
    receipt = account.receipt(attempt, DEVICES, FREE, ())
    assert (receipt.segments.environment_ms, receipt.segments.start_ms) == (300, 50)
    assert golden("node.account.environment-snapshot-0123456789ab") in receipt.text()


def test_a_run_that_never_started_costs_nothing_and_says_why(tmp_path: Path) -> None:
    account = AttemptAccount(launch(tmp_path), FakeClock())
    ended = msgspec.structs.replace(ENDED, state=State.FAILED, reason=Reason.START_FAILED)
    receipt = account.receipt(ended, (), {}, ())
    assert (receipt.reason, receipt.gpu_ms, receipt.gpus) == ("start_failed", 0, ())
    assert receipt.gate == "no device was reserved"
    assert (receipt.warm, receipt.warm_reason, receipt.peak_memory_bytes) == (False, "no stem arrived", None)
    assert set(msgspec.structs.asdict(receipt.segments).values()) == {None}


def test_what_the_memory_controller_knows_is_better_than_a_sum(tmp_path: Path) -> None:
    account = whole_life(tmp_path)
    account.peaks, account.peak_bytes = {0: 100}, 7
    receipt = account.receipt(ENDED, DEVICES, FREE, ("FAKE-H100-1",))
    assert (receipt.peak_memory_bytes, receipt.micros, receipt.quarantined) == (7, None, ("FAKE-H100-1",))


TARIFF = Tariff(
    gpu_micros_per_hour=3_600_000_000,
    core_micros_per_hour=36_000_000,
    memory_micros_per_hour=7_200_000,
    dbu_micros_per_hour=7_200_000_000,
    currency="EUR",
)


def test_a_receipt_and_the_ledger_say_the_same_to_the_millionth(tmp_path: Path) -> None:
    account = whole_life(tmp_path, TARIFF)
    receipt = account.receipt(ENDED, DEVICES, FREE, ())
    whole = charge(facts(tmp_path), gpu_type="H100", tariff=TARIFF)
    assert (receipt.gpu_ms, receipt.micros, receipt.currency) == (whole.gpu_ms, whole.micros, "EUR")
    assert receipt.bill == Bill(billed_ms=5_750, dbu_micros=whole.dbu_micros)
    assert "5.8 GPU-seconds, 5.75 EUR (11.50 DBU)" in receipt.text()


def test_a_receipt_says_what_of_the_cost_is_for_cores_and_memory(tmp_path: Path) -> None:
    limited = RunSpec(resources=Resources(cpus=8, memory_bytes=3 << 30), policy="research")
    account = AttemptAccount(msgspec.structs.replace(launch(tmp_path, TARIFF), spec=limited), clock := FakeClock())
    account.fact(FactKind.EXEC, DEVICES)
    clock.advance(10)
    account.fact(FactKind.FREED, DEVICES)
    receipt = account.receipt(ENDED, DEVICES, FREE, ())
    assert receipt.bill is not None
    assert (receipt.bill.core_ms, receipt.bill.core_micros) == (80_000, 800_000)
    assert (receipt.bill.memory_mib_ms, receipt.bill.memory_micros) == (3_072 * 10_000, 60_000)
    assert receipt.micros == 20_000_000 + 800_000 + 60_000
    text = receipt.text()
    assert golden("node.account.20-86-eur") in text and "policy: research" in text


def test_a_fault_of_the_platform_is_metered_and_its_receipt_says_that_it_costs_nothing(tmp_path: Path) -> None:
    lost = msgspec.structs.replace(ENDED, state=State.FAILED, reason=Reason.GPU_LOST)
    receipt = whole_life(tmp_path, TARIFF).receipt(lost, DEVICES, FREE, ())
    assert (receipt.gpu_ms, receipt.micros) == (5_750, 0)
    assert receipt.bill == Bill(billed_ms=0, unbilled="a GPU of the run failed")
    assert golden("node.account.billed-gpu-seconds") in receipt.text()


def test_what_came_after_the_grace_is_not_billed_and_the_receipt_says_so(tmp_path: Path) -> None:
    account = AttemptAccount(launch(tmp_path, TARIFF), clock := FakeClock())
    account.mark("exec")
    account.fact(FactKind.EXEC, DEVICES)
    clock.advance(10)
    account.stopping(msgspec.structs.replace(RETURNED, reason=Reason.CANCELLED, wake_ns=2 * 10**9), DEVICES)
    clock.advance(7)  # the kernel took so long to end them
    account.fact(FactKind.FREED, DEVICES)
    cancelled = msgspec.structs.replace(ENDED, state=State.CANCELLED, reason=Reason.CANCELLED)
    receipt = account.receipt(cancelled, DEVICES, FREE, ())
    assert (receipt.gpu_ms, receipt.micros) == (34_000, 24_000_000)
    assert golden("node.account.billed-10-gpu") in receipt.text()


# --- the gate in words -----------------------------------------------------------------------------------------------

HELD = Verdict(ok=False, evidence="pid 7 still holds 2.0 GiB")


@pytest.mark.parametrize(
    ("count", "verdicts", "kind", "sentence"),
    [
        (0, {}, DeviceKind.GPU, "no device was reserved"),
        (1, {"a": Verdict(ok=True, evidence="no process")}, DeviceKind.GPU, "1 GPU verified free: no process"),
        (
            2,
            {"a": Verdict(ok=True, evidence="no process"), "b": HELD},
            DeviceKind.GPU,
            "1 of 2 GPUs not free: b: pid 7 still holds 2.0 GiB",
        ),
        (1, {}, DeviceKind.CPU, "1 CPU slot free: no process of the run is left"),
        (2, {}, DeviceKind.CPU, "2 CPU slots free: no process of the run is left"),
    ],
    ids=["nothing", "free", "held", "slot", "slots"],
)
def test_F11_the_hand_back_in_one_sentence(
    count: int, verdicts: dict[str, Verdict], kind: DeviceKind, sentence: str
) -> None:
    assert gate_text(DEVICES[:count], verdicts, kind) == sentence


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", DEVICES[0])
    assert json.loads((tmp_path / "a.json").read_text())["uuid"] == "FAKE-H100-0"
    write_json(tmp_path / "gone" / "a.json", DEVICES[0])
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
