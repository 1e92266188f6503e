"""The life of one run under a server, as a table: events in, instructions out.

    QUEUED ─▶ STARTING ─▶ RUNNING ─▶ STOPPING ─▶ SUCCEEDED FAILED CANCELLED TIMED_OUT BUDGET_STOPPED LOST
       ▲         └────────────┴─────────┤ ⇅
       │                                │ UNREACHABLE (and back to where it was, or further)
       └──── a new attempt ◀────────────┘

What lives here: what the server makes of what it is told about a run. What must not: clocks, the database, nodes. What
happens inside of one attempt is `attempt_lifecycle.py`, which the attempt's supervisor drives; this table sees its
reports.

Five promises, each a test:
- A run ends once. A terminal state has an empty row.
- A new attempt is made only after proof that the one before is over: its own report (`AttemptEnded`, and `proven`),
  another
  boot of its node or the hard fence passed (`GivenUp`), an operator's word (`Forgotten`). Silence is no proof; it
  shows.
- A server that was restored from a backup starts nothing that it knew before: whether it ran since is unknown.
- User code runs again only if the user asked for it (`retries`, `resume`, `retry_on_infra`). What failed before user
  code began is the platform's fault and is tried again on its own, a few times.
- A run with `resume` ends. `unsaved_max` attempts in a row that reached the time limit or were lost, and saved nothing
  new to continue from, end it as NO_PROGRESS. An attempt that made room for others is not one of these.

A stop that is final (cancel, timeout, budget) replaces one after which the run may go on (preempt, drain), never the
other way round. What is done is done: every rank returned before the stop arrived means SUCCEEDED.
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
"""How long a run waits after the first, second … attempt that the platform failed before user code began."""
INFRA_RETRIES_MAX = len(INFRA_PAUSES_S)
"""Attempts that are made again for that reason."""

LOST = frozenset({*(r for r, meaning in MEANINGS.items() if meaning.state is State.LOST), Reason.NODE_REBOOTED}) - {
    Reason.SERVER_RESTORED
}
"""The attempt could not be ended in order: user code may have been anywhere."""

FAULT_RETRIES_MAX = 3
"""Attempts that are made again for users who asked for `retry_on_infra`, when user code ran and was not what failed."""
FAULTS = LOST | {Reason.GPU_LOST}
"""What failed was the infrastructure, while user code ran."""

_DISPLACED = frozenset({Reason.PREEMPTED, Reason.DRAINED})
_FINAL_STOPS = frozenset({StopReason.CANCEL, StopReason.TIMEOUT, StopReason.BUDGET, StopReason.IDLE})
# User code ran to its end. Once more would cost the same and change nothing, or leave two results.
_RAN_TO_ITS_END = frozenset({Reason.RESULT_UNSERIALISABLE, Reason.RESULT_TOO_LARGE, Reason.RESULT_UPLOAD})
_POINTLESS = _RAN_TO_ITS_END | {
    Reason.SECRET_MISSING,
    Reason.UNSATISFIABLE,
    Reason.NO_PROGRESS,
}  # a person has to act first
_ORDER = (State.STARTING, State.RUNNING, State.STOPPING)


class RunInstruction(StrEnum):
    """Instructions to the caller, in the transaction that writes the run."""

    SEND_STOP = "send_stop"
    REQUEUE = "requeue"
    CONCLUDE = "conclude"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the next decision depends on."""

    run_id: str
    fence: int = 0  # number of the current attempt; 0 before the first. It only grows
    state: State = State.QUEUED
    reason: Reason | None = None
    stop: StopReason | None = None  # why the run is asked to stop, or None
    began: bool = False  # whether user code of the current attempt is known to have started
    may_resume: bool = False  # `spec.resume`
    retries_left: int = 0  # of those the user asked for
    infra_left: int = INFRA_RETRIES_MAX  # attempts that may be made again because the platform failed
    before: State | None = None  # where an UNREACHABLE run was when it was last heard of, else None
    # Attempts that may be made again because a GPU or a node failed; none unless the user asked for it.
    faults_left: int = 0
    # Whether an attempt that reaches its time limit is followed by another: the limit is not the user's own but what an
    # attempt may take here (`max_run_s`), and they asked for `resume`.
    goes_on_at_limit: bool = False
    saved: int = 0  # number of the newest attempt that is known to have saved something to continue from; 0 for none
    unsaved: int = 0  # attempts in a row, up to the last that is over, that saved nothing
    unsaved_max: int = UNSAVED_MAX  # so many of these end the run
    ran: int = 0  # attempts that are over of which user code began, without those that made room for others
    attempts_max: int | None = None  # how many of these a usage policy allows, or None


class RunPlaced(msgspec.Struct, frozen=True):
    """The scheduler has chosen the place of the next attempt; the intent, before any node hears of it."""


class UserCodeStarted(msgspec.Struct, frozen=True):
    """User code begins."""


class Stopping(msgspec.Struct, frozen=True):
    """The node says that the attempt is being ended, for whatever reason."""


class Silent(msgspec.Struct, frozen=True):
    """Nothing was heard of the attempt for longer than the soft limit."""


class Heard(msgspec.Struct, frozen=True):
    """A report arrived; `state` is STARTING, RUNNING or STOPPING, as the node sees it."""

    state: State


class StopAsked(msgspec.Struct, frozen=True):
    """A user or a limit asks the run to stop."""

    why: StopReason


class AttemptEnded(msgspec.Struct, frozen=True):
    """The node reports that the attempt is over."""

    reason: Reason
    began: bool
    proven: bool = True  # whether no process of it is left; else one could not be ended, and there is no other attempt
    uncounted: bool = False  # whether one that is made because this one did not begin is not one of those that may be


class GivenUp(msgspec.Struct, frozen=True):
    """It is certain without a report that the attempt is over: NODE_REBOOTED, or NODE_GONE after the hard fence."""

    reason: Reason


class Forgotten(msgspec.Struct, frozen=True):
    """An operator knows that the node is dead."""


class Restored(msgspec.Struct, frozen=True):
    """The server goes on from a backup in which the run waits; since then it may have run."""


class Unsatisfiable(msgspec.Struct, frozen=True):
    """The run has waited for as long as it may for what nothing that has joined can ever serve."""


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
    """An event arrived in a state that has no row for it; nothing was changed."""

    def __init__(self, run: Run, event: Event) -> None:
        super().__init__(f"run {run.run_id} (fence {run.fence}): {type(event).__name__} in {run.state}")


def advance(run: Run, event: Event) -> Step:
    """Return the run after an event, and what has to be done about it.

    An unchanged run has nothing to write. Raises IllegalTransition when the table has no row for the event.
    """
    handler = TABLE[run.state].get(type(event))
    if handler is None:
        raise IllegalRunTransition(run, event)
    return handler(run, event)


def over_because(event: AttemptEnded | GivenUp | Forgotten) -> Reason:
    """Return why the attempt is over that an event ends; the run may go on with another one."""
    return Reason.NODE_GONE if isinstance(event, Forgotten) else event.reason


def surely_ends(run: Run, reasons: Iterable[Reason], *, began: bool) -> bool:
    """Return whether a run ends with its attempt, whichever of some reasons that ends for."""
    ends = (advance(run, AttemptEnded(reason, began=began)) for reason in reasons)
    return all(RunInstruction.CONCLUDE in instructions for _, instructions in ends)


def pause_s(retries_used: int, last: Reason | None, *, began: bool) -> float:
    """Return how long a run that waits again is left alone, in seconds: what failed just now would fail again."""
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
        return run, ()  # it has nothing that it could make room with
    return _conclude(replace(run, stop=event.why), STOPPED_BY[event.why])


def _stop(run: Run, event: StopAsked) -> Step:
    is_stronger = run.stop not in _FINAL_STOPS and event.why in _FINAL_STOPS
    if run.stop is not None and not is_stronger:
        return run, ()
    run = replace(run, stop=event.why)
    if run.state is State.UNREACHABLE:  # still is; but whatever is heard next, it is stopping
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
        # Unasked it would go on with another attempt: then the stop is what ended it, else what is reported.
        goes_on = untouched or at_limit or reason in _DISPLACED
        return _conclude(run, STOPPED_BY[run.stop] if goes_on and run.stop else reason)
    if isinstance(event, AttemptEnded) and not event.proven:
        return _conclude(run, reason)  # what is left of it might run beside the next one
    if untouched:
        if reason in _DISPLACED or (isinstance(event, AttemptEnded) and event.uncounted):
            return _requeue(run)  # an operator decided that, or a node went away, and user code never saw it
        return _requeue_for_infra(run, Reason.GANG_START if reason is Reason.START_FAILED else reason)
    if at_limit:
        return _resume(run, reason)
    if reason in _DISPLACED:
        return _requeue(run) if run.may_resume else _conclude(run, reason)
    if reason in LOST and run.may_resume:
        # One that dies before it begins, time and again, would do so for ever.
        return _resume(run, reason) if run.began else _requeue_for_infra(run, reason)
    if reason in FAULTS and run.faults_left > 0:
        return _run_again(run, reason, faults_left=run.faults_left - 1)
    may_retry = reason in LOST or (MEANINGS[reason].state is State.FAILED and reason not in _POINTLESS)
    if may_retry and run.retries_left > 0:
        return _run_again(run, reason, retries_left=run.retries_left - 1)
    return _conclude(run, reason)


def _resume(run: Run, reason: Reason) -> Step:
    """Make another attempt of a run that continues from checkpoints, unless attempt after attempt left none."""
    unsaved = 0 if run.saved >= run.fence else run.unsaved + 1
    if unsaved >= run.unsaved_max:
        return _conclude(replace(run, unsaved=unsaved), Reason.NO_PROGRESS)
    return _run_again(run, reason, unsaved=unsaved)


def _run_again(run: Run, reason: Reason, **spent: int) -> Step:
    """Make another attempt of a run whose user code began, unless it has had as many as its policy allows."""
    if not run.began:
        return _requeue(replace(run, **spent))
    if has_used_attempts(run):
        return _conclude(run, reason)
    return _requeue(replace(run, ran=run.ran + 1, **spent))


def has_used_attempts(run: Run) -> bool:
    """Return whether the current attempt, once it has begun, is the last that a usage policy allows."""
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
    """Return the state that comes later in an attempt's life: nothing goes backwards."""
    return max(one, other, key=_ORDER.index)


_OVER: Mapping[type, _Handler] = {AttemptEnded: _over, GivenUp: _over, Forgotten: _over}

# Rows: state → event → handler. A terminal state has an empty row: nothing can happen to it any more.
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
