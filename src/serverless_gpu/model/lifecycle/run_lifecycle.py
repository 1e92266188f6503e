"""State machine of a server's run: a transition table from events to instructions.

    QUEUED ─▶ STARTING ─▶ RUNNING ─▶ STOPPING ─▶ SUCCEEDED FAILED CANCELLED TIMED_OUT BUDGET_STOPPED LOST
       ▲         └────────────┴─────────┤ ⇅
       │                                │ UNREACHABLE (and back to the earlier state, or a later one)
       └──── a new attempt ◀────────────┘

The transition table decides how the server interprets reports about a run. The module reads no clock and uses neither
the database nor nodes. `attempt_lifecycle.py` handles the events within one attempt, which the attempt's supervisor
reports. This module receives only those supervisor reports.

Tests check five guarantees of the run lifecycle:

- A run ends once. Terminal states have empty rows in the transition table.

- The server starts a new attempt only after proof that the preceding attempt has ended. The server accepts four proofs:
  the attempt's report (`AttemptEnded` with `proven`), a node reboot, the hard fence (`GivenUp`), or an operator's
  command (`Forgotten`). A missing report does not prove that the attempt has ended.

- A server restored from a backup does not start the backup's queued runs, because those runs may have started since the
  backup.

- User code runs again only at the user's request (`retries`, `resume`, `retry_on_infra`). The server automatically
  retries a run a few times if the run failed before user code started.

- A run with `resume` always ends. The run ends as NO_PROGRESS after `unsaved_max` consecutive lost or timed-out
  attempts without a new checkpoint. Preempted attempts do not count toward `unsaved_max`.

A final stop request (cancel, timeout, budget) replaces a resumable stop request (preempt, drain). A resumable stop
request never replaces a final stop request. If every rank returned before the stop request arrived, the run is
SUCCEEDED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from serverless_gpu.model.lifecycle.attempt import (
    MEANINGS,
    STOPPED_BY,
    TERMINAL,
    UNSAVED_MAX,
    Reason,
    State,
    StopReason,
)

INFRA_PAUSES_S = (1.0, 5.0, 30.0)
"""Pauses in seconds after consecutive platform failures before user code."""
INFRA_RETRIES_MAX = len(INFRA_PAUSES_S)
"""Maximum number of new attempts after platform failures before user code."""

LOST = frozenset({*(r for r, meaning in MEANINGS.items() if meaning.state is State.LOST), Reason.NODE_REBOOTED}) - {
    Reason.SERVER_RESTORED
}
"""Final reasons of lost attempts, whose user code may have stopped at any point."""

FAULT_RETRIES_MAX = 3
"""Maximum number of new attempts with `retry_on_infra` after infrastructure failures."""
FAULTS = LOST | {Reason.GPU_LOST}
"""Final reasons for infrastructure failures while user code ran."""

_DISPLACED = frozenset({Reason.PREEMPTED, Reason.DRAINED})
_FINAL_STOPS = frozenset({StopReason.CANCEL, StopReason.TIMEOUT, StopReason.BUDGET, StopReason.IDLE})
# Final reasons of attempts whose user code finished. Another attempt after finished user code would fail again or
# produce a second result.
_RAN_TO_ITS_END = frozenset({Reason.RESULT_UNSERIALISABLE, Reason.RESULT_TOO_LARGE, Reason.RESULT_UPLOAD})
_POINTLESS = _RAN_TO_ITS_END | {
    Reason.SECRET_MISSING,
    Reason.UNSATISFIABLE,
    Reason.NO_PROGRESS,
}  # Another attempt after a `_POINTLESS` reason first requires an action of an operator or user.
_ORDER = (State.STARTING, State.RUNNING, State.STOPPING)


class RunInstruction(StrEnum):
    """Instructions that the caller of `advance` executes in the transaction that writes the run."""

    SEND_STOP = "send_stop"
    REQUEUE = "requeue"
    CONCLUDE = "conclude"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run, with all inputs for its next state transition."""

    run_id: str
    fence: int = 0  # Number of the current attempt, which only increases, or 0 before any attempt.
    state: State = State.QUEUED
    reason: Reason | None = None
    stop: StopReason | None = None  # Reason of the stop request, or None.
    began: bool = False  # True if the server knows that user code of the current attempt has started.
    may_resume: bool = False  # Value of `spec.resume`.
    retries_left: int = 0  # Remaining attempts from the user's `retries`.
    infra_left: int = INFRA_RETRIES_MAX  # Remaining attempts after platform failures before user code.
    before: State | None = None  # The last known state of an UNREACHABLE run, else None.
    # Remaining attempts after GPU or node failures, or 0 unless the user requested `retry_on_infra`.
    faults_left: int = 0
    # True if the run starts another attempt after the server's time limit (`max_run_s`), because the user set `resume`.
    goes_on_at_limit: bool = False
    saved: int = 0  # Number of the newest attempt with a known checkpoint, else 0.
    unsaved: int = 0  # Number of consecutive attempts, up to the last ended attempt, without a new checkpoint.
    # Maximum number of consecutive attempts without a new checkpoint, after which the run ends.
    unsaved_max: int = UNSAVED_MAX
    ran: int = 0  # Number of ended attempts with started user code, excluding preempted attempts.
    attempts_max: int | None = None  # Maximum number of attempts with started user code, from a usage policy, or None.


class RunPlaced(msgspec.Struct, frozen=True):
    """The scheduler has placed the next attempt, but no node has received the attempt yet."""


class UserCodeStarted(msgspec.Struct, frozen=True):
    """User code of the attempt has started."""


class Stopping(msgspec.Struct, frozen=True):
    """The node reports that the attempt is stopping, for any reason."""


class Silent(msgspec.Struct, frozen=True):
    """The server has received no report of the attempt for longer than the soft limit."""


class Heard(msgspec.Struct, frozen=True):
    """The server received a report from the attempt, with `state` STARTING, RUNNING or STOPPING."""

    state: State


class StopAsked(msgspec.Struct, frozen=True):
    """A user or a limit requests a stop of the run."""

    why: StopReason


class AttemptEnded(msgspec.Struct, frozen=True):
    """The node reports that the attempt has ended."""

    reason: Reason
    began: bool
    # True if all processes of the attempt have ended. If the node could not kill a process, the server starts no
    # further attempt.
    proven: bool = True
    uncounted: bool = False  # True if the next attempt does not count toward `infra_left`.


class GivenUp(msgspec.Struct, frozen=True):
    """The attempt ended without a report because its node rebooted or the hard fence passed."""

    reason: Reason


class Forgotten(msgspec.Struct, frozen=True):
    """An operator has declared the attempt's node dead."""


class Restored(msgspec.Struct, frozen=True):
    """An operator restored the server from a backup that contains the run as a queued run.

    The run may have started after the backup.
    """


class Unsatisfiable(msgspec.Struct, frozen=True):
    """The run has reached its wait limit, and no joined node can ever satisfy the run's request."""


Event = (
    RunPlaced
    | UserCodeStarted
    | Stopping
    | Silent
    | Heard
    | StopAsked
    | AttemptEnded
    | GivenUp
    | Forgotten
    | Restored
    | Unsatisfiable
)
Step = tuple[Run, tuple[RunInstruction, ...]]
_Handler = Callable[..., Step]


class IllegalRunTransition(Exception):
    """Raised if the transition table has no entry for an event in the run's state."""

    def __init__(self, run: Run, event: Event) -> None:
        super().__init__(f"run {run.run_id} (fence {run.fence}): {type(event).__name__} in {run.state}")


def advance(run: Run, event: Event) -> Step:
    """Return the run's state after an event, and the instructions for the caller.

    The caller need not write an unchanged run to the database. Raises IllegalRunTransition if the transition table has
    no entry for the event.
    """
    handler = TABLE[run.state].get(type(event))
    if handler is None:
        raise IllegalRunTransition(run, event)
    return handler(run, event)


def over_because(event: AttemptEnded | GivenUp | Forgotten) -> Reason:
    """Return the reason why an attempt ended, even if the run may continue with another attempt."""
    return Reason.NODE_GONE if isinstance(event, Forgotten) else event.reason


def surely_ends(run: Run, reasons: Iterable[Reason], *, began: bool) -> bool:
    """Return True if each of the given final reasons of an attempt also ends the run."""
    ends = (advance(run, AttemptEnded(reason, began=began)) for reason in reasons)
    return all(RunInstruction.CONCLUDE in instructions for _, instructions in ends)


def pause_s(retries_used: int, last: Reason | None, *, began: bool) -> float:
    """Return the pause in seconds before a requeued run may start.

    The pause follows a platform failure, because an immediate retry would likely fail again.
    """
    if last is None or began or last in _DISPLACED or not 0 < retries_used <= INFRA_RETRIES_MAX:
        return 0.0
    return INFRA_PAUSES_S[retries_used - 1]


def _started(run: Run, _: UserCodeStarted) -> Step:
    return replace(run, began=True, state=_later(run.state, State.RUNNING)), ()


def _stopping(run: Run, _: Stopping) -> Step:
    return replace(run, state=State.STOPPING), ()


def _silent(run: Run, _: Silent) -> Step:
    return replace(run, state=State.UNREACHABLE, before=run.state), ()


def _stop_in_queue(run: Run, event: StopAsked) -> Step:
    if event.why not in _FINAL_STOPS:
        return run, ()  # A queued run has no devices to release.
    return _conclude(replace(run, stop=event.why), STOPPED_BY[event.why])


def _stop(run: Run, event: StopAsked) -> Step:
    is_stronger = run.stop not in _FINAL_STOPS and event.why in _FINAL_STOPS
    if run.stop is not None and not is_stronger:
        return run, ()
    run = replace(run, stop=event.why)
    if run.state is State.UNREACHABLE:
        # An unreachable run changes to STOPPING only after the next report from its node.
        return replace(run, before=State.STOPPING), (RunInstruction.SEND_STOP,)
    return replace(run, state=State.STOPPING), (RunInstruction.SEND_STOP,)


def _over(run: Run, event: AttemptEnded | GivenUp | Forgotten) -> Step:
    reason = over_because(event)
    run = replace(run, began=run.began or (isinstance(event, AttemptEnded) and event.began))
    if MEANINGS[reason].state is State.SUCCEEDED:
        return _conclude(run, reason)
    untouched = not run.began and (MEANINGS[reason].may_retry or reason in _DISPLACED)
    at_limit = reason is Reason.TIMEOUT and run.goes_on_at_limit
    if run.stop in _FINAL_STOPS:
        # If only the stop request prevents another attempt, the run ends with the reason of the stop request.
        goes_on = untouched or at_limit or reason in _DISPLACED
        return _conclude(run, STOPPED_BY[run.stop] if goes_on and run.stop else reason)
    if isinstance(event, AttemptEnded) and not event.proven:
        # A surviving process of this attempt could run concurrently with the next attempt.
        return _conclude(run, reason)
    if untouched:
        if reason in _DISPLACED or (isinstance(event, AttemptEnded) and event.uncounted):
            return _requeue(run)  # An operator moved the run, or its node stopped reporting, before user code started.
        return _requeue_for_infra(run, Reason.GANG_START if reason is Reason.START_FAILED else reason)
    if at_limit:
        return _resume(run, reason)
    if reason in _DISPLACED:
        return _requeue(run) if run.may_resume else _conclude(run, reason)
    if reason in LOST and run.may_resume:
        # A run that repeatedly dies before user code starts must not retry forever.
        return _resume(run, reason) if run.began else _requeue_for_infra(run, reason)
    if reason in FAULTS and run.faults_left > 0:
        return _run_again(run, reason, faults_left=run.faults_left - 1)
    may_retry = reason in LOST or (MEANINGS[reason].state is State.FAILED and reason not in _POINTLESS)
    if may_retry and run.retries_left > 0:
        return _run_again(run, reason, retries_left=run.retries_left - 1)
    return _conclude(run, reason)


def _resume(run: Run, reason: Reason) -> Step:
    """Queue a resumable run again, unless too many consecutive attempts saved no checkpoint."""
    unsaved = 0 if run.saved >= run.fence else run.unsaved + 1
    if unsaved >= run.unsaved_max:
        return _conclude(replace(run, unsaved=unsaved), Reason.NO_PROGRESS)
    return _run_again(run, reason, unsaved=unsaved)


def _run_again(run: Run, reason: Reason, **spent: int) -> Step:
    """Requeue a run whose user code began, unless its usage policy allows no further attempt."""
    if not run.began:
        return _requeue(replace(run, **spent))
    if has_used_attempts(run):
        return _conclude(run, reason)
    return _requeue(replace(run, ran=run.ran + 1, **spent))


def has_used_attempts(run: Run) -> bool:
    """Return True if the usage policy allows no further attempt once the current attempt starts user code."""
    return run.attempts_max is not None and run.ran + 1 >= run.attempts_max


def _requeue_for_infra(run: Run, reason_of_the_last: Reason) -> Step:
    if run.infra_left == 0:
        return _conclude(run, reason_of_the_last)
    return _requeue(replace(run, infra_left=run.infra_left - 1))


def _requeue(run: Run) -> Step:
    run = replace(run, state=State.QUEUED, stop=None, began=False, before=None)
    return run, (RunInstruction.REQUEUE,)


def _conclude(run: Run, reason: Reason) -> Step:
    run = replace(run, state=MEANINGS[reason].state, reason=reason, before=None)
    return run, (RunInstruction.CONCLUDE,)


def _nothing(run: Run, _: Event) -> Step:
    return run, ()


def _later(one: State, other: State) -> State:
    """Return the later of two states, because an attempt never returns to an earlier state."""
    return max(one, other, key=_ORDER.index)


_OVER: Mapping[type, _Handler] = {AttemptEnded: _over, GivenUp: _over, Forgotten: _over}

# Transition table: state → event → handler. Terminal states have empty rows because terminal states accept no events.
TABLE: Mapping[State, Mapping[type, _Handler]] = {
    State.QUEUED: {
        RunPlaced: lambda run, _: (replace(run, fence=run.fence + 1, state=State.STARTING), ()),
        StopAsked: _stop_in_queue,
        Restored: lambda run, _: _conclude(run, Reason.SERVER_RESTORED),
        Unsatisfiable: lambda run, _: _conclude(run, Reason.UNSATISFIABLE),
    },
    State.STARTING: {
        UserCodeStarted: _started,
        Stopping: _stopping,
        Silent: _silent,
        Heard: _nothing,
        StopAsked: _stop,
        **_OVER,
    },
    State.RUNNING: {
        UserCodeStarted: _nothing,
        Stopping: _stopping,
        Silent: _silent,
        Heard: _nothing,
        StopAsked: _stop,
        **_OVER,
    },
    State.UNREACHABLE: {
        Silent: _nothing,
        Heard: lambda run, event: (
            replace(run, state=_later(run.before or State.STARTING, event.state), before=None),
            (),
        ),
        StopAsked: _stop,
        **_OVER,
    },
    State.STOPPING: {
        UserCodeStarted: _started,
        Stopping: _nothing,
        Silent: _silent,
        Heard: _nothing,
        StopAsked: _stop,
        **_OVER,
    },
    **{state: {} for state in State if state in TERMINAL},
}
