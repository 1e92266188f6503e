"""State machine of one attempt, which turns events into instructions.

    QUEUED ─▶ STARTING ─▶ RUNNING
       │          │          │
       └──────────┴──────────┴─▶ STOPPING ─▶ SUCCEEDED FAILED CANCELLED TIMED_OUT BUDGET_STOPPED LOST

The module contains the transition table and its handlers. The handlers use no clocks, processes, sockets or files.
`advance` takes an attempt, an event and the time, and returns the next attempt value and instructions for the caller.
The supervisor calls `advance` for local runs and for runs of a server. `run_lifecycle.py` decides how the server
interprets reports and silence (UNREACHABLE).

The state STOPPING has two phases. In TERMINATING, ranks have a stop request and a deadline. In KILLING, the supervisor
kills all processes and waits for `TreeEmpty`. A successful run also passes through KILLING, in which the supervisor
ends leftover processes of the ranks. The state RUNNING has two special phases. In RETURNED, all ranks of the
supervisor's node have returned while ranks of other nodes still run. The phase SETTLING follows a rank's report that a
peer closed its connection. The peer is the likely cause of the failure. The peer's own report may arrive milliseconds
later. The supervisor waits `SETTLE_NS` for the peer's report before deciding the cause.

A crash while a returned rank's interpreter shuts down is not a failure, because the rank's result is already durable.
After a crash during shutdown, the supervisor only adds a note to the receipt.

`judge_loss` decides the billing of an attempt whose supervisor died without reporting an end:

    the machine has booted since        ─┐
    hardware memory failure hit the pid  ├─▶ SUPERVISOR_LOST     not billed: the platform failed
    machine-wide OOM hit the pid, and   ─┘
      the run had a memory limit
    anything else                       ───▶ SUPERVISOR_KILLED   billed until the last report

A process of the run may have the uid of its supervisor and can then kill the supervisor at any time. The supervisor's
death alone therefore does not prove a platform failure. Evidence must come from the kernel's log, because the run
cannot write to the kernel's log. Without a memory limit, an out-of-memory kill of the supervisor proves no platform
failure, because the run can exhaust the machine's memory. The server bills a rank's `HOST_OOM` for the same reason. An
unreadable boot identifier or kernel log is no evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from serverless_gpu.model.lifecycle.attempt import (
    MEANINGS,
    PASSING_STOPS,
    STOPPED_BY,
    Attempt,
    Event,
    Failure,
    GangPlaced,
    GpuFailed,
    HangConfirmed,
    LeaseExpired,
    PeerFailed,
    Phase,
    Preparing,
    RankExecuting,
    RankExited,
    RankFailed,
    RankReturned,
    RanksNotStarted,
    Reason,
    Released,
    State,
    StemLost,
    StopRequested,
    Tick,
    TreeEmpty,
)

SETTLE_NS = 200_000_000
FENCE_GRACE_NS = 30_000_000_000
"""Maximum time for ranks to end after the lease expired, because the server starts another attempt after a minute."""
FAULT_NS = 60_000_000_000
"""Time after a GPU failure at which the supervisor ends an attempt whose ranks have not noticed the failure."""

ASKED = frozenset({Reason.NODE_PARTITIONED, *STOPPED_BY.values()})
"""Final reasons of attempts that ended because of a stop request."""
_NOT_A_FAILURE = ASKED | {Reason.COMPLETED}


class AttemptInstruction(StrEnum):
    """Instructions to the caller of `advance`."""

    START_RANKS = "start_ranks"
    RELEASE_RANKS = "release_ranks"
    TERMINATE_RANKS = "terminate_ranks"
    KILL_TREE = "kill_tree"
    CONCLUDE = "conclude"


Step = tuple[Attempt, tuple[AttemptInstruction, ...]]
_Handler = Callable[..., Step]


class IllegalAttemptTransition(Exception):
    """Raised if the transition table has no row for an event. The attempt keeps its state."""

    def __init__(self, attempt: Attempt, event: Event) -> None:
        super().__init__(f"run {attempt.run_id} (fence {attempt.fence}): {type(event).__name__} in {attempt.state}")


def advance(attempt: Attempt, event: Event, now_ns: int) -> Step:
    """Return the attempt after an event, and the instructions to carry out.

    `now_ns` is the node's boot time. Raises IllegalAttemptTransition if the transition table has no row for the event.
    """
    handler = TABLE[attempt.state].get(type(event))
    if handler is None:
        raise IllegalAttemptTransition(attempt, event)
    return handler(attempt, event, now_ns)


def _start_failed(attempt: Attempt, event: RanksNotStarted, now_ns: int) -> Step:
    failure = Failure(rank=None, reason=event.reason, at_ns=now_ns, detail=event.detail)
    return _kill(_with_failure(attempt, failure), now_ns, event.reason)


def _tick_starting(attempt: Attempt, _: Tick, now_ns: int) -> Step:
    if attempt.wake_ns is None or now_ns < attempt.wake_ns:
        return attempt, ()
    seconds = attempt.limits.start_ns // 1_000_000_000
    detail = f"no user code started within {seconds} s after the attempt got its GPUs"
    return _start_failed(attempt, RanksNotStarted(reason=Reason.START_FAILED, detail=detail), now_ns)


def _executing(attempt: Attempt, _: RankExecuting, now_ns: int) -> Step:
    if attempt.exec_ns is not None:
        return attempt, ()
    timeout = attempt.limits.timeout_ns
    wake = None if timeout is None else now_ns + timeout - attempt.limits.stop_grace_ns()
    return replace(attempt, state=State.RUNNING, exec_ns=now_ns, wake_ns=wake), ()


def _returned(attempt: Attempt, event: RankReturned, now_ns: int) -> Step:
    attempt = replace(attempt, returned=attempt.returned | {event.rank})
    if len(attempt.returned) < attempt.world_size or attempt.state is State.STOPPING:
        return attempt, ()
    if attempt.has_peers:
        return replace(attempt, phase=Phase.RETURNED), ()
    return _released(attempt, Released(), now_ns)


def _released(attempt: Attempt, _: Released, now_ns: int) -> Step:
    if len(attempt.returned) < attempt.world_size:
        return attempt, ()
    # The run can only succeed, because all results are durable. The ranks have the grace period to exit by themselves.
    attempt = _terminating(attempt, now_ns, Reason.COMPLETED, attempt.limits.grace_ns)
    if len(attempt.exited) == attempt.world_size:  # The ranks exited while they waited for ranks on other nodes.
        return _kill(attempt, now_ns, Reason.COMPLETED)
    return attempt, (AttemptInstruction.RELEASE_RANKS,)


def _failed(attempt: Attempt, event: RankFailed, now_ns: int) -> Step:
    attempt = _with_failure(attempt, event.failure)
    accounted = attempt.returned | {failure.rank for failure in attempt.failures}
    if not event.failure.peer_lost or len(accounted) == attempt.world_size:
        return _stop_for_failure(attempt, now_ns)
    if attempt.phase is Phase.NONE:
        return replace(attempt, phase=Phase.SETTLING, wake_ns=now_ns + SETTLE_NS), ()
    return attempt, ()


def _exited(attempt: Attempt, event: RankExited, now_ns: int) -> Step:
    attempt = replace(attempt, exited=attempt.exited | {event.rank})
    reported = event.rank in attempt.returned or any(f.rank == event.rank for f in attempt.failures)
    if reported:
        return _concluded_if_gone(attempt, now_ns)
    attempt = _with_failure(attempt, _exit_failure(event, now_ns))
    return _stop_for_failure(attempt, now_ns)


def _concluded_if_gone(attempt: Attempt, now_ns: int) -> Step:
    """End the attempt on a node when all the node's ranks have exited, to free the devices early."""
    if attempt.phase is Phase.RETURNED and len(attempt.exited) == attempt.world_size:
        return _released(attempt, Released(), now_ns)
    return attempt, ()


def _exited_while_stopping(attempt: Attempt, event: RankExited, now_ns: int) -> Step:
    attempt = replace(attempt, exited=attempt.exited | {event.rank})
    reported = event.rank in attempt.returned or any(f.rank == event.rank for f in attempt.failures)
    ours = event.signal in (15, 9) and not event.out_of_memory
    if not reported and event.signal is not None and not ours:
        attempt = _with_failure(attempt, _exit_failure(event, now_ns))
    if attempt.phase is Phase.TERMINATING and len(attempt.exited) == attempt.world_size:
        return _kill(attempt, now_ns, attempt.reason or Reason.COMPLETED)
    return attempt, ()


def _exit_failure(event: RankExited, now_ns: int) -> Failure:
    reason = Reason.NO_RESULT if event.signal is None else Reason.RANK_SIGNAL
    if event.out_of_memory:
        reason = Reason.HOST_OOM
    return Failure(rank=event.rank, reason=reason, at_ns=now_ns, signal=event.signal, detail=event.detail)


def _stem_lost(attempt: Attempt, event: StemLost, now_ns: int) -> Step:
    # All results are durable, because only processes that waited for other nodes have died.
    if attempt.phase is Phase.RETURNED:
        return _concluded_if_gone(replace(attempt, exited=attempt.returned), now_ns)
    reason = Reason.HOST_OOM if event.out_of_memory else Reason.RUNTIME_LOST
    if attempt.exec_ns is None and not event.out_of_memory:
        reason = Reason.START_FAILED
    failure = Failure(rank=None, reason=reason, at_ns=now_ns, detail=event.detail)
    return _kill(_with_failure(attempt, failure), now_ns, reason)


def _asked_to_stop(attempt: Attempt, event: StopRequested, now_ns: int) -> Step:
    reason = STOPPED_BY[event.why]
    if attempt.exec_ns is None:
        return _kill(attempt, now_ns, reason)
    # Another node reached the time limit first because its user code started earlier. The same grace period applies on
    # all nodes.
    grace = attempt.limits.stop_grace_ns() if reason is Reason.TIMEOUT else attempt.limits.grace_ns
    return _terminating(attempt, now_ns, reason, grace), (AttemptInstruction.TERMINATE_RANKS,)


def _asked_again(attempt: Attempt, event: StopRequested, _: int) -> Step:
    """Update the reason of a stop in progress. The stop reason decides whether another attempt may follow."""
    reason = STOPPED_BY[event.why]
    if attempt.reason in PASSING_STOPS and reason not in PASSING_STOPS:
        return replace(attempt, reason=reason), ()
    return attempt, ()


def _hang(attempt: Attempt, event: HangConfirmed, now_ns: int) -> Step:
    if attempt.phase is Phase.RETURNED:
        return attempt, ()
    failure = Failure(rank=None, reason=Reason.COLLECTIVE_HANG, at_ns=now_ns, detail=event.detail)
    return _stop_for_failure(_with_failure(attempt, failure), now_ns)


def _gpu_failed(attempt: Attempt, event: GpuFailed, now_ns: int) -> Step:
    """Schedule a forced end of the attempt, because the rank on the failed GPU may hang."""
    attempt = _gpu_failed_while_stopping(attempt, event, now_ns)[0]
    if attempt.phase is Phase.RETURNED:
        return attempt, ()
    fault_ns = now_ns if attempt.fault_ns is None else attempt.fault_ns
    wake_ns = fault_ns + FAULT_NS if attempt.wake_ns is None else min(attempt.wake_ns, fault_ns + FAULT_NS)
    return replace(attempt, fault_ns=fault_ns, wake_ns=wake_ns), ()


def _gpu_failed_while_stopping(attempt: Attempt, event: GpuFailed, now_ns: int) -> Step:
    failure = Failure(rank=None, reason=Reason.GPU_LOST, at_ns=now_ns, detail=event.detail)
    return _with_failure(attempt, failure), ()


def _peer_failed(attempt: Attempt, event: PeerFailed, now_ns: int) -> Step:
    """Stop the attempt after a failure on another node.

    Later rank reports are consequences of the other node's failure. A crash that the supervisor reaps is an independent
    failure.
    """
    failure = Failure(rank=None, reason=Reason.PEER_FAILED, at_ns=now_ns, peer_lost=True, detail=event.detail)
    attempt = _with_failure(attempt, failure)
    if attempt.exec_ns is None:
        return _kill(attempt, now_ns, Reason.PEER_FAILED)
    return _stop_for_failure(attempt, now_ns)


def _tick_running(attempt: Attempt, _: Tick, now_ns: int) -> Step:
    if attempt.wake_ns is None or now_ns < attempt.wake_ns:
        return attempt, ()
    if attempt.phase is Phase.SETTLING or (attempt.fault_ns is not None and now_ns >= attempt.fault_ns + FAULT_NS):
        return _stop_for_failure(attempt, now_ns)
    grace = attempt.limits.stop_grace_ns()
    return _terminating(attempt, now_ns, Reason.TIMEOUT, grace), (AttemptInstruction.TERMINATE_RANKS,)


def _tick_stopping(attempt: Attempt, _: Tick, now_ns: int) -> Step:
    if attempt.phase is not Phase.TERMINATING or attempt.wake_ns is None or now_ns < attempt.wake_ns:
        return attempt, ()
    attempt = replace(attempt, killed=True)
    return _kill(attempt, now_ns, attempt.reason or Reason.COMPLETED)


def _tree_empty(attempt: Attempt, _: TreeEmpty, now_ns: int) -> Step:
    if attempt.phase is not Phase.KILLING or attempt.reason is None:
        return attempt, ()
    reason = attempt.reason
    if reason not in _NOT_A_FAILURE and attempt.cause is not None:
        reason = attempt.cause.reason  # A failure during the stop may explain the end of the attempt better.
    state = MEANINGS[reason].state
    attempt = replace(attempt, state=state, reason=reason, wake_ns=None, phase=Phase.NONE)
    return attempt, (AttemptInstruction.CONCLUDE,)


def _expired(attempt: Attempt, _: LeaseExpired, now_ns: int) -> Step:
    """Stop the attempt after the lease expired, because another attempt may soon run on other nodes."""
    if attempt.exec_ns is None:
        return _kill(attempt, now_ns, Reason.NODE_PARTITIONED)
    grace = min(attempt.limits.grace_ns, FENCE_GRACE_NS)
    return _terminating(attempt, now_ns, Reason.NODE_PARTITIONED, grace), (AttemptInstruction.TERMINATE_RANKS,)


def _expired_while_stopping(attempt: Attempt, _: LeaseExpired, now_ns: int) -> Step:
    if attempt.wake_ns is None:
        return attempt, ()
    return replace(attempt, wake_ns=min(attempt.wake_ns, now_ns + FENCE_GRACE_NS)), ()


def _nothing(attempt: Attempt, _: Event, now_ns: int) -> Step:
    return attempt, ()


def _with_failure(attempt: Attempt, failure: Failure) -> Attempt:
    return replace(attempt, failures=(*attempt.failures, failure))


def _stop_for_failure(attempt: Attempt, now_ns: int) -> Step:
    cause = attempt.cause
    reason = cause.reason if cause else Reason.RUNTIME_LOST
    attempt = _terminating(attempt, now_ns, reason, attempt.limits.failure_grace_ns)
    if len(attempt.exited) == attempt.world_size:
        return _kill(attempt, now_ns, reason)
    return attempt, (AttemptInstruction.TERMINATE_RANKS,)


def _terminating(attempt: Attempt, now_ns: int, reason: Reason, grace_ns: int) -> Attempt:
    return replace(
        attempt,
        state=State.STOPPING,
        phase=Phase.TERMINATING,
        reason=reason,
        stop_ns=now_ns,
        wake_ns=now_ns + grace_ns,
    )


def _kill(attempt: Attempt, now_ns: int, reason: Reason) -> Step:
    stop_ns = now_ns if attempt.stop_ns is None else attempt.stop_ns
    attempt = replace(attempt, state=State.STOPPING, phase=Phase.KILLING, reason=reason, stop_ns=stop_ns, wake_ns=None)
    return attempt, (AttemptInstruction.KILL_TREE,)


# Transition table: state → event → handler. Final states have empty table rows because final states accept no events.
TABLE: Mapping[State, Mapping[type, _Handler]] = {
    State.QUEUED: {
        GangPlaced: lambda attempt, _, now_ns: (
            replace(attempt, state=State.STARTING, wake_ns=now_ns + attempt.limits.start_ns),
            (AttemptInstruction.START_RANKS,),
        ),
        Preparing: _nothing,
        RanksNotStarted: _start_failed,
        StemLost: _stem_lost,
        StopRequested: _asked_to_stop,
        LeaseExpired: _expired,
        PeerFailed: _peer_failed,
        Released: _nothing,
        Tick: _nothing,
    },
    State.STARTING: {
        Preparing: lambda attempt, _, now_ns: (replace(attempt, wake_ns=now_ns + attempt.limits.start_ns), ()),
        RanksNotStarted: _start_failed,
        RankExecuting: _executing,
        RankFailed: _failed,
        RankExited: _exited,
        GpuFailed: lambda attempt, event, now_ns: _start_failed(
            attempt, RanksNotStarted(Reason.START_FAILED, event.detail), now_ns
        ),
        StemLost: _stem_lost,
        StopRequested: _asked_to_stop,
        LeaseExpired: _expired,
        PeerFailed: _peer_failed,
        Released: _nothing,
        Tick: _tick_starting,
    },
    State.RUNNING: {
        Preparing: _nothing,
        RankExecuting: _executing,
        RankReturned: _returned,
        RankFailed: _failed,
        RankExited: _exited,
        StemLost: _stem_lost,
        StopRequested: _asked_to_stop,
        HangConfirmed: _hang,
        GpuFailed: _gpu_failed,
        Tick: _tick_running,
        LeaseExpired: _expired,
        PeerFailed: _peer_failed,
        Released: _released,
    },
    State.UNREACHABLE: {},  # Only the server uses the UNREACHABLE state.
    State.STOPPING: {
        Preparing: _nothing,
        RanksNotStarted: _nothing,
        RankExecuting: _nothing,
        RankReturned: _returned,
        RankFailed: lambda attempt, event, _: (_with_failure(attempt, event.failure), ()),
        RankExited: _exited_while_stopping,
        GpuFailed: _gpu_failed_while_stopping,
        StemLost: lambda attempt, _, now_ns: _kill(attempt, now_ns, attempt.reason or Reason.RUNTIME_LOST),
        StopRequested: _asked_again,
        Tick: _tick_stopping,
        TreeEmpty: _tree_empty,
        LeaseExpired: _expired_while_stopping,
        PeerFailed: _nothing,
        Released: _nothing,
    },
    State.SUCCEEDED: {},
    State.FAILED: {},
    State.CANCELLED: {},
    State.TIMED_OUT: {},
    State.BUDGET_STOPPED: {},
    State.LOST: {},
}


UNKNOWN_BOOT = "unknown"
"""Placeholder for a machine without a boot identifier."""
_OUT_OF_MEMORY = re.compile(r"Out of memory: Killed process (\d+) \(.*oom_score_adj:(-?\d+)\s*$")
_MEMORY_FAILURE = re.compile(r"(?:Memory failure: \S+|MCE): Killing .{1,16}:(\d+) due to hardware memory corruption")
_TEXT_MAX = 200


class LossEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence about a supervisor's death that the run cannot forge."""

    boot_id: str  # Boot identifier in the attempt's facts, or "" without facts.
    boot_id_now: str
    pid: int | None = None  # Process ID of the supervisor, or None when unknown.
    is_memory_limited: bool = False  # True if the run had its own memory limit.
    kernel_lines: tuple[str, ...] = ()  # Kernel log records since the allocation of the attempt's devices.


def judge_loss(evidence: LossEvidence) -> tuple[Reason, str]:
    """Return the reason for the supervisor's loss, and the evidence as text or ""."""
    boots = {evidence.boot_id, evidence.boot_id_now}
    if len(boots) == 2 and not boots & {"", UNKNOWN_BOOT}:
        return Reason.SUPERVISOR_LOST, "the machine has restarted since the attempt began"
    if evidence.pid is not None and UNKNOWN_BOOT not in boots:
        record = next(_records_of(evidence.pid, evidence), "")
        if record:
            return Reason.SUPERVISOR_LOST, f"the kernel log shows: {record[:_TEXT_MAX]}"
    return Reason.SUPERVISOR_KILLED, ""


def _records_of(pid: int, evidence: LossEvidence) -> Iterator[str]:
    """Yield kernel log records of a process's death that the process's run cannot have caused."""
    for line in evidence.kernel_lines:
        failed = _MEMORY_FAILURE.match(line)
        if failed is not None and int(failed[1]) == pid:
            yield line
        killed = _OUT_OF_MEMORY.match(line)
        # A process of the same uid can raise the supervisor's OOM score, but cannot lower the score.
        is_raised = killed is not None and int(killed[2]) > 0
        if killed is not None and int(killed[1]) == pid and evidence.is_memory_limited and not is_raised:
            yield line
