"""The account of an attempt: facts on disk as they happen, the receipt they add up to, the gate in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.model.attempt import Attempt, Limits, Reason, State
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.ledger import Fact, FactKind
from serverless_gpu.model.pricing import UNPRICED, Tariff
from serverless_gpu.model.receipt import Receipt, Segments
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.account import Account, gate_text, write_json
from serverless_gpu.node.gate import Verdict
from serverless_gpu.node.protocol import Context, Launch
from serverless_gpu.testing import FakeClock

DEVICES = tuple(
    Device(uuid=f"FAKE-H100-{n}", index=n, type="H100", memory_bytes=80 << 30, kind=DeviceKind.FAKE) for n in range(2)
)
CONTEXT = Context(
    python="python", flags=(), environ={}, cwd="/", umask=0o22, argv=("",), sys_path=(), descriptors_max=1024
)
BOOT = "00000000-0000-0000-0000-000000000000"
START_NS, WALL_NS = 1_000_000_000_000, 1_800_000_000_000_000_000
FREE = {device.uuid: Verdict(ok=True, evidence="no process, 0 MiB used (baseline 0 MiB)") for device in DEVICES}


def launch(directory: Path, tariff: Tariff = UNPRICED) -> Launch:
    return Launch(
        run_id="r",
        fence=2,
        directory=str(directory),
        spec=RunSpec(tags={"team": "search"}),
        candidates=DEVICES,
        world_size=2,
        context=CONTEXT,
        called_ns=START_NS,
        tariff=tariff,
    )


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


def whole_life(directory: Path, tariff: Tariff = UNPRICED) -> Account:
    clock = FakeClock()
    account = Account(launch(directory, tariff), clock)
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
        account.mark(mark)
        if kind is not None:
            account.fact(kind, DEVICES)
    return account


ENDED = Attempt(run_id="r", fence=2, world_size=2, limits=Limits(), state=State.SUCCEEDED, reason=Reason.COMPLETED)


def test_facts_are_on_disk_when_they_happen(tmp_path: Path) -> None:
    clock = FakeClock()
    account = Account(launch(tmp_path), clock)
    account.fact(FactKind.RESERVED, DEVICES)
    assert facts(tmp_path) == [fact(0, FactKind.RESERVED, 0)] == account.facts
    clock.advance(3)
    account.fact(FactKind.EXEC, DEVICES)
    assert facts(tmp_path) == [fact(0, FactKind.RESERVED, 0), fact(1, FactKind.EXEC, 3)]


def test_of_the_signs_of_life_the_last_is_kept_in_memory_and_all_on_disk(tmp_path: Path) -> None:
    clock = FakeClock()
    account = Account(launch(tmp_path), clock)
    account.fact(FactKind.EXEC, DEVICES)
    for _ in range(3):
        clock.advance(60)
        account.fact(FactKind.ALIVE, DEVICES)
    signs = [fact(number, FactKind.ALIVE, 60 * number) for number in (1, 2, 3)]
    assert account.facts == [fact(0, FactKind.EXEC, 0), signs[-1]]
    assert facts(tmp_path) == [fact(0, FactKind.EXEC, 0), *signs]


def test_F28_a_full_disk_costs_the_file_and_not_the_account(tmp_path: Path) -> None:
    account = Account(launch(tmp_path / "gone"), FakeClock())
    account.fact(FactKind.EXEC, DEVICES)
    assert account.facts == [fact(0, FactKind.EXEC, 0)]


def test_a_mark_is_the_first_time(tmp_path: Path) -> None:
    clock = FakeClock()
    account = Account(launch(tmp_path), clock)
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
        facts=4,
        world_size=2,
        notes=("a note",),
    )
    assert msgspec.json.decode((tmp_path / "receipt.json").read_bytes(), type=Receipt) == receipt


def test_waiting_for_the_callers_word_is_time_of_the_environment(tmp_path: Path) -> None:
    clock = FakeClock()
    account = Account(launch(tmp_path), clock)
    for seconds, mark in ((0.1, "stem"), (0.1, "reserved"), (0.3, "confirmed"), (0.05, "exec")):
        clock.advance(seconds)
        account.mark(mark)
    attempt = Attempt(run_id="r", fence=2, world_size=2, limits=Limits(), state=State.SUCCEEDED)
    account.environment = "snapshot 0123456789ab, 3 units, overlay"
    receipt = account.receipt(attempt, DEVICES, FREE, ())
    assert (receipt.segments.environment_ms, receipt.segments.start_ms) == (300, 50)
    assert "environment: snapshot 0123456789ab, 3 units, overlay" in receipt.text()


def test_a_run_that_never_started_costs_nothing_and_says_why(tmp_path: Path) -> None:
    account = Account(launch(tmp_path), FakeClock())
    ended = msgspec.structs.replace(ENDED, state=State.FAILED, reason=Reason.START_FAILED)
    receipt = account.receipt(ended, (), {}, ())
    assert (receipt.reason, receipt.gpu_ms, receipt.gpus, receipt.gate) == ("start_failed", 0, (), "nothing was taken")
    assert (receipt.warm, receipt.warm_reason, receipt.peak_memory_bytes) == (False, "no stem came", None)
    assert set(msgspec.structs.asdict(receipt.segments).values()) == {None}


def test_what_the_memory_controller_knows_is_better_than_a_sum(tmp_path: Path) -> None:
    account = whole_life(tmp_path)
    account.peaks, account.peak_bytes = {0: 100}, 7
    receipt = account.receipt(ENDED, DEVICES, FREE, ("FAKE-H100-1",))
    assert (receipt.peak_memory_bytes, receipt.micros, receipt.quarantined) == (7, None, ("FAKE-H100-1",))


# --- the gate in words -----------------------------------------------------------------------------------------------

HELD = Verdict(ok=False, evidence="pid 7 still holds 2.0 GiB")


@pytest.mark.parametrize(
    ("count", "verdicts", "kind", "sentence"),
    [
        (0, {}, DeviceKind.GPU, "nothing was taken"),
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
