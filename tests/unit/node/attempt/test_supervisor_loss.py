"""Who pays for an attempt whose supervisor died, and what its directory says afterwards."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.lifecycle.attempt import MEANINGS, SUPERVISOR_GONE, Fact, FactKind, Reason, State
from serverless_gpu.model.lifecycle.attempt_lifecycle import UNKNOWN_BOOT, LossEvidence, judge_loss
from serverless_gpu.node.attempt.history import first_facts, read_ending, read_receipt
from serverless_gpu.node.attempt.supervisor_loss import LostAttempt, settle_loss
from serverless_gpu.testing import FakeClock

PID = 4711
OOM = f"Out of memory: Killed process {PID} (python3) total-vm:9kB, UID:1000 pgtables:1kB oom_score_adj:0"
BROKEN = f"Memory failure: 0x1a2b3: Killing python3:{PID} due to hardware memory corruption"
KILLED = (Reason.SUPERVISOR_KILLED, "")


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (LossEvidence(boot_id="a", boot_id_now="a", pid=PID), Reason.SUPERVISOR_KILLED),
        (LossEvidence(boot_id="a", boot_id_now="b", pid=PID), Reason.SUPERVISOR_LOST),
        (LossEvidence(boot_id="", boot_id_now="b"), Reason.SUPERVISOR_KILLED),
        (LossEvidence(boot_id="a", boot_id_now=""), Reason.SUPERVISOR_KILLED),
        (LossEvidence(boot_id=UNKNOWN_BOOT, boot_id_now="b"), Reason.SUPERVISOR_KILLED),
        (LossEvidence(boot_id="a", boot_id_now=UNKNOWN_BOOT), Reason.SUPERVISOR_KILLED),
    ],
)
def test_22A8_only_another_boot_that_is_known_is_evidence(evidence: LossEvidence, reason: Reason) -> None:
    assert judge_loss(evidence)[0] is reason


@pytest.mark.parametrize(
    ("line", "limited", "reason"),
    [
        (OOM, True, Reason.SUPERVISOR_LOST),
        (OOM.replace("adj:0", "adj:-900"), True, Reason.SUPERVISOR_LOST),
        (BROKEN, True, Reason.SUPERVISOR_LOST),
        (BROKEN, False, Reason.SUPERVISOR_LOST),
        (f"MCE: Killing python3:{PID} due to hardware memory corruption fault at 7f00", False, Reason.SUPERVISOR_LOST),
        (OOM, False, Reason.SUPERVISOR_KILLED),  # a run without a limit may have used the memory up itself
        (OOM.replace("adj:0", "adj:1000"), True, Reason.SUPERVISOR_KILLED),  # somebody raised it
        (OOM.replace("Out of memory", "Memory cgroup out of memory"), True, Reason.SUPERVISOR_KILLED),
        (OOM.replace(str(PID), "12"), True, Reason.SUPERVISOR_KILLED),
        (f"x {OOM}", True, Reason.SUPERVISOR_KILLED),
        (OOM.replace(str(PID), "12").replace("python3", f"Killed process {PID} ("), True, Reason.SUPERVISOR_KILLED),
        (f"python3[{PID}]: segfault at 0 ip 0 sp 0 error 4", True, Reason.SUPERVISOR_KILLED),
        ("", True, Reason.SUPERVISOR_KILLED),
    ],
)
def test_22A8_only_what_the_run_cannot_bring_about_is_evidence(line: str, limited: bool, reason: Reason) -> None:
    evidence = LossEvidence(boot_id="a", boot_id_now="a", pid=PID, is_memory_limited=limited, kernel_lines=(line,))
    assert judge_loss(evidence)[0] is reason
    without = msgspec.structs.replace(evidence, pid=None)
    assert judge_loss(without) == KILLED, "it is not known whom the record is about"


@given(
    boots=st.tuples(st.sampled_from(["", "a", "b", UNKNOWN_BOOT]), st.sampled_from(["", "a", "b", UNKNOWN_BOOT])),
    pid=st.none() | st.integers(1, 9),
    limited=st.booleans(),
    lines=st.lists(st.text(max_size=80)).map(tuple),
)
def test_22A8_nothing_else_makes_a_lost_supervisor_free(
    boots: tuple[str, str], pid: int | None, limited: bool, lines: tuple[str, ...]
) -> None:
    evidence = LossEvidence(
        boot_id=boots[0], boot_id_now=boots[1], pid=pid, is_memory_limited=limited, kernel_lines=lines
    )
    reason, detail = judge_loss(evidence)
    assert reason in SUPERVISOR_GONE and bool(detail) is (reason is Reason.SUPERVISOR_LOST)
    assert (reason is Reason.SUPERVISOR_LOST) is (set(boots) == {"a", "b"})


def test_22A8_both_reasons_are_the_same_but_for_who_pays() -> None:
    killed, lost = MEANINGS[Reason.SUPERVISOR_KILLED], MEANINGS[Reason.SUPERVISOR_LOST]
    assert (killed.state, killed.may_retry) == (lost.state, lost.may_retry) == (State.LOST, False)
    assert killed.is_billed and not lost.is_billed


# --- what is written --------------------------------------------------------------------------------------------------


def write_facts(
    directory: Path, clock: FakeClock, *kinds: FactKind, boot_id: str | None = None, tail: str = ""
) -> None:
    """Write facts a second apart, the last of them now."""
    directory.mkdir(parents=True)
    lines = []
    for seq, kind in enumerate(kinds):
        ago_ns = (len(kinds) - 1 - seq) * 1_000_000_000
        fact = Fact(
            attempt="r:1",
            seq=seq,
            kind=kind,
            boot_id=boot_id or clock.boot_id(),
            boottime_ns=clock.boottime_ns() - ago_ns,
            wall_ns=clock.wall_ns() - ago_ns,
            gpus=("GPU-0", "GPU-1"),
            cpus=0,
            memory_bytes=0,
        )
        lines.append(msgspec.json.encode(fact).decode() + "\n")
    (directory / "facts.jsonl").write_text("".join(lines) + tail)


BEGUN = (FactKind.RESERVED, FactKind.EXEC)
LOST = LostAttempt(run_id="r", fence=1, gpu_type="H100", world_size=2)


@pytest.mark.parametrize(("seen_s", "tail"), [*itertools.product((None, 0.5, 10.0), ("", '{"attempt":"r:1","se'))])
def test_22A8_time_is_counted_to_the_last_sign_of_life(tmp_path: Path, seen_s: float | None, tail: str) -> None:
    clock, directory = FakeClock(), tmp_path / "r" / "1"
    clock.advance(1000)
    write_facts(directory, clock, *BEGUN, tail=tail)
    began_ns = clock.boottime_ns()
    clock.advance(60)
    seen_ns = None if seen_s is None else began_ns + round(seen_s * 1e9)
    stopped = settle_loss(directory, clock, seen_ns=seen_ns, lost=LOST)
    receipt = read_receipt(directory)
    assert stopped.reason is Reason.SUPERVISOR_KILLED and read_ending(directory) == stopped
    assert receipt is not None and receipt.bill is not None
    assert receipt.gpu_ms == receipt.bill.billed_ms == round(2000 * (seen_s or 0))
    assert receipt.facts == len(first_facts(directory)) == (2 if seen_s is None else 3)
    again = (directory / "facts.jsonl").read_bytes()
    clock.advance(60)
    settle_loss(directory, clock, seen_ns=clock.boottime_ns(), lost=LOST)
    assert (directory / "facts.jsonl").read_bytes() == again and read_receipt(directory) == receipt


def test_22A8_time_before_a_restart_is_counted_and_not_billed(tmp_path: Path) -> None:
    clock, directory = FakeClock(), tmp_path / "r" / "1"
    clock.advance(1000)
    write_facts(directory, clock, *BEGUN, FactKind.ALIVE, boot_id="before")
    stopped = settle_loss(directory, clock, seen_ns=clock.boottime_ns() + 10**10, lost=LOST)
    receipt = read_receipt(directory)
    assert stopped.reason is Reason.SUPERVISOR_LOST and stopped.cause is not None and stopped.cause.detail
    assert receipt is not None and receipt.bill is not None
    assert (receipt.gpu_ms, receipt.bill.billed_ms) == (2000, 0), "boottimes of two boots are not compared"
    assert receipt.bill.unbilled == MEANINGS[Reason.SUPERVISOR_LOST].sentence


@pytest.mark.parametrize("kinds", [(FactKind.RESERVED,), (*BEGUN, FactKind.EXITED), (*BEGUN, FactKind.FREED)])
def test_22A8_no_sign_of_life_is_added_where_nothing_is_used(tmp_path: Path, kinds: tuple[FactKind, ...]) -> None:
    clock, directory = FakeClock(), tmp_path / "r" / "1"
    clock.advance(1000)
    write_facts(directory, clock, *kinds)
    before = (directory / "facts.jsonl").read_bytes()
    clock.advance(10)
    settle_loss(directory, clock, seen_ns=clock.boottime_ns(), lost=LOST)
    assert (directory / "facts.jsonl").read_bytes() == before and read_receipt(directory) is not None
