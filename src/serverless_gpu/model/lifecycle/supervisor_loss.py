"""Decides who pays for an attempt whose supervisor died without reporting an end.

    the machine has booted since        ─┐
    hardware memory failure hit the pid  ├─▶ SUPERVISOR_LOST     unbilled: the platform failed
    machine-wide OOM hit the pid, and   ─┘
      the run's own memory was limited
    anything else                       ───▶ SUPERVISOR_KILLED   billed, up to the last sign of life

A process of the run may have the uid of its supervisor, so it can kill the supervisor at any time. Its death alone is
therefore no evidence of a fault. Evidence must come from where the run cannot write: the kernel. Runs without a memory
limit can use up the machine's memory themselves, so for them an out-of-memory kill proves nothing; `HOST_OOM` of a
rank is billed for the same reason.

Failure cases: a boot identifier or kernel log that cannot be read is no evidence. Values only: no clock, no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from serverless_gpu.model.lifecycle.attempt import Reason

UNKNOWN_BOOT = "unknown"
"""The boot identifier of a machine that has none."""
_OUT_OF_MEMORY = re.compile(r"Out of memory: Killed process (\d+) \(.*oom_score_adj:(-?\d+)\s*$")
_MEMORY_FAILURE = re.compile(r"(?:Memory failure: \S+|MCE): Killing .{1,16}:(\d+) due to hardware memory corruption")
_TEXT_MAX = 200


class LossEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence about a supervisor's death that its run could not have written."""

    boot_id: str  # of the boot in which the attempt's facts were written; "" where there are none
    boot_id_now: str
    pid: int | None = None  # of the supervisor; None where it is not known
    is_memory_limited: bool = False  # whether the run had a memory limit of its own
    kernel_lines: tuple[str, ...] = ()  # records that the kernel itself has written since the attempt got its devices


def judge_loss(evidence: LossEvidence) -> tuple[Reason, str]:
    """Return the reason with which the attempt ends, and the evidence in words; "" where there is none."""
    boots = {evidence.boot_id, evidence.boot_id_now}
    if len(boots) == 2 and not boots & {"", UNKNOWN_BOOT}:
        return Reason.SUPERVISOR_LOST, "the machine has restarted since"
    if evidence.pid is not None and UNKNOWN_BOOT not in boots:
        record = next(_records_of(evidence.pid, evidence), "")
        if record:
            return Reason.SUPERVISOR_LOST, f"the kernel's log says: {record[:_TEXT_MAX]}"
    return Reason.SUPERVISOR_KILLED, ""


def _records_of(pid: int, evidence: LossEvidence) -> Iterator[str]:
    """Yield the kernel's records that explain the death of a process without its run having caused it."""
    for line in evidence.kernel_lines:
        failed = _MEMORY_FAILURE.match(line)
        if failed is not None and int(failed[1]) == pid:
            yield line
        killed = _OUT_OF_MEMORY.match(line)
        # A process of the same uid may raise the score that makes the kernel choose the supervisor, but not lower it.
        is_raised = killed is not None and int(killed[2]) > 0
        if killed is not None and int(killed[1]) == pid and evidence.is_memory_limited and not is_raised:
            yield line
