"""End of an attempt: the client's message, and the verdicts on its devices."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from serverless_gpu.model.hangs.hang_report import ranks_text
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Attempt, Hang, Reason, State
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.node.devices.gpu_gate import GatePolicy, Verdict, verify
from serverless_gpu.node.devices.reservation import Borrowed, DeviceReservation
from serverless_gpu.node.output.logs import RankLog, hidden_tails
from serverless_gpu.node.processes.process_tree import Left

_LEFT_NAMED = 3


def make_stopped(
    attempt: Attempt, logs: Mapping[int, RankLog], hang: Hang | None, hint: str = "", *, proven: bool = True
) -> Stopped:
    """Return the client's message once no rank runs any more.

    `hint` is the driver's explanation of failed user code; `proven` means that no process of the attempt is left.
    """
    assert attempt.reason is not None
    cause = attempt.cause
    blamed = logs.get(cause.rank) if cause is not None and cause.rank is not None else None
    failed = (failure.rank for failure in (cause, *attempt.failures) if failure is not None)
    first = [rank for rank in failed if rank is not None]
    return Stopped(
        state=attempt.state,
        reason=attempt.reason,
        cause=cause,
        consequences=tuple(failure for failure in attempt.failures if failure is not cause),
        log_tail=blamed.tail() if blamed is not None else "",
        tails=hidden_tails(logs, first) if attempt.state is State.FAILED else {},
        hang=hang if attempt.reason is Reason.COLLECTIVE_HANG else None,
        proven=proven,
        hint=hint if attempt.state is State.FAILED and attempt.reason is not Reason.GPU_LOST else "",
    )


def stopped_sentence(stopped: Stopped) -> str:
    """Return why it ended, in one sentence; "" where there is nothing to say."""
    if stopped.reason is Reason.COMPLETED:
        return ""
    detail = stopped.cause.detail if stopped.cause is not None else ""
    meaning = MEANINGS[stopped.reason].sentence
    return f"{meaning}: {detail}" if detail and stopped.state is State.FAILED else meaning


def verdicts_of(
    reservation: DeviceReservation | Borrowed, known: Mapping[str, Verdict], *, proven: bool, left: Sequence[Left] = ()
) -> dict[str, Verdict]:
    """Return a verdict for each device; failed devices, in `known`, need no look.

    `proven` means that no process of the attempt is left; else `left` are some of them.
    """
    uuids = [device.uuid for device in reservation.devices]
    if not proven:
        why = f"{left_text(left)} could not be ended" if left else ""
        return dict.fromkeys(uuids, Verdict(False, why or "it is not certain that every process of the run has ended"))
    asked = [uuid for uuid in uuids if uuid not in known]
    return {**known, **verify(reservation.provider, asked, reservation.before, GatePolicy(), time.sleep)}


def killed_text(attempt: Attempt, kill_ns: int) -> str:
    """Return which ranks did not stop in their grace."""
    still = sorted(set(attempt.numbers) - attempt.exited)
    grace_s = (kill_ns - (attempt.stop_ns or 0)) / 1e9
    return f"{ranks_text(still)} did not stop in {grace_s:.1f} s and {'was' if len(still) == 1 else 'were'} killed"


def left_text(left: Sequence[Left]) -> str:
    """Return which processes are still there, for people."""
    names = [f"{each.pid} ({each.name})" for each in left[:_LEFT_NAMED]]
    more = f" and {len(left) - _LEFT_NAMED} more" if len(left) > _LEFT_NAMED else ""
    return f"process{'es' if len(left) > 1 else ''} {', '.join(names)}{more}"
