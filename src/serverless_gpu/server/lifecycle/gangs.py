"""Decides how an event on one node changes the gang, with pure functions.

    an event of a node ─▶ `after`: the new `Crew` ─▶ `follow`: all nodes (`model/lifecycle/gang_lifecycle.py`)
                                                          └─ the resulting events of the run

`model/lifecycle/run_lifecycle.py` defines the events. A `Crew` contains a gang's ranks on one node and has a separate
lifecycle. `follow` combines the lifecycles of all nodes into run events. For a gang on one node, the node's events are
the run events.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle import gang_lifecycle
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Cause, Fold, Halt, Over
from serverless_gpu.model.lifecycle.run_lifecycle import (
    AttemptEnded,
    Event,
    Forgotten,
    GivenUp,
    Heard,
    Silent,
    Stopping,
    UserCodeStarted,
    over_because,
)
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.crews import StoredCrew
from serverless_gpu.server.records.runs import StoredRun

_OF_ALL = frozenset({Reason.COLLECTIVE_HANG, Reason.TIMEOUT})
"""End reasons that apply to all nodes of a gang."""
_PASSED_ON = {Reason.TIMEOUT: StopReason.TIMEOUT}
"""Time limits that each node enforces. The first node that reaches a time limit stops the gang."""
_ORDER = (State.STARTING, State.RUNNING, State.STOPPING)


def after(crew: StoredCrew, event: Event, *, at_ns: int, exec_ns: int | None = None) -> StoredCrew:
    """Return the new state of a gang on one node after an event."""
    if crew.ended_ns is not None:
        return crew
    if exec_ns is not None and crew.started_ns is None:
        crew = msgspec.structs.replace(crew, started_ns=exec_ns)
    match event:
        case UserCodeStarted():
            return msgspec.structs.replace(crew, began=True, state=_later(crew.state, State.RUNNING))
        case Stopping():
            return msgspec.structs.replace(crew, state=State.STOPPING)
        case Silent() if crew.state is not State.UNREACHABLE:
            return msgspec.structs.replace(crew, state=State.UNREACHABLE, before=crew.state)
        case Heard() if crew.state is State.UNREACHABLE:
            state = _later(crew.before or State.STARTING, event.state)
            return msgspec.structs.replace(crew, state=state, before=None)
        case AttemptEnded() | GivenUp() | Forgotten():
            return _over(crew, event, at_ns)
    return crew


def _over(crew: StoredCrew, event: AttemptEnded | GivenUp | Forgotten, at_ns: int) -> StoredCrew:
    reason = over_because(event)
    is_word = isinstance(event, AttemptEnded)
    return msgspec.structs.replace(
        crew,
        state=MEANINGS[reason].state,
        before=None,
        reason=reason,
        began=crew.began or (isinstance(event, AttemptEnded) and event.began),
        proven=not isinstance(event, AttemptEnded) or event.proven,
        ended_ns=at_ns,
        settled_ns=crew.settled_ns if is_word else at_ns,
        uncharged=True,
    )


def with_report(crew: StoredCrew, *, returned: bool, halt: Halt | None) -> StoredCrew:
    """Record the return or early end of a gang's ranks on one node."""
    if crew.ended_ns is not None:
        return crew
    if returned and not crew.returned:
        crew = msgspec.structs.replace(crew, returned=True)
    if halt is not None and crew.halt_json is None:
        crew = msgspec.structs.replace(crew, halt_json=msgspec.json.encode(halt).decode())
    return crew


class ReportReply(msgspec.Struct, frozen=True, kw_only=True):
    """Gang fields of a report's answer.

    Attributes:
        release: True if the ranks of the node may exit.
        peer_failed: the failure on another node, or "".
        stop: the limit that another node reached. The ranks stop with their full grace period. The run itself is not
            stopped.
    """

    release: bool = False
    peer_failed: str = ""
    stop: StopReason | None = None


def reply(attempt: StoredAttempt, crew: StoredCrew, *, is_stopping: bool) -> ReportReply:
    """Return the gang fields for a report's answer.

    Args:
        attempt: the current attempt, on several nodes.
        crew: the part of the gang on the reporting node.
        is_stopping: True after a stop request for the run. The nodes receive the stop request separately.
    """
    cause = attempt.cause
    if crew.ended_ns is not None or (attempt.released and crew.halt_json is None):
        return ReportReply(release=attempt.released and crew.ended_ns is None)
    if cause is None and not is_stopping and crew.halt_json is None:
        return ReportReply(release=gang_lifecycle.may_leave(_life(crew, ""), [_life(one, "") for one in attempt.crews]))
    if cause is None or not gang_lifecycle.must_stop(_life(crew, ""), cause) or (cause.crew is None and is_stopping):
        return ReportReply()
    if cause.reason in _PASSED_ON:
        return ReportReply(stop=_PASSED_ON[cause.reason])
    return ReportReply(peer_failed=cause_sentence(cause, attempt))


def cause_sentence(cause: Cause, attempt: StoredAttempt, *, after: Reason | None = None) -> str:
    """Return a gang's end reason as one line for users.

    Args:
        cause: the event that ended the gang.
        attempt: the attempt of the gang.
        after: a reason whose sentence precedes the result, so that the result does not repeat the reason; None without
            a preceding sentence.
    """
    what = cause.detail or ("" if after is cause.reason else MEANINGS[cause.reason].sentence)
    if cause.reason in _OF_ALL:
        return what
    where = f" on {attempt.crews[cause.crew].node}" if cause.crew is not None else ""
    whose = f"rank {cause.rank}{where}" if cause.rank is not None else where.strip()
    return ": ".join(part for part in (whose, what) if part)


def lives(crews: Sequence[StoredCrew], detail: str = "") -> list[gang_lifecycle.Crew]:
    """Return the `Crew` values of a gang. `detail` describes the node that has just ended."""
    return [_life(crew, detail) for crew in crews]


def follow(run: StoredRun, crews: Sequence[StoredCrew], *, is_word: bool, detail: str = "") -> tuple[Fold, list[Event]]:
    """Return the combined state of a gang's nodes, and the resulting run events.

    Args:
        run: the run as read in this transaction, with an unfinished attempt.
        crews: the current parts of that attempt, one per node.
        is_word: True if a node reported the event; False if the server inferred the event, for example from silence.
        detail: description of the end on the last node, for users.
    """
    attempt = run.attempt
    assert attempt is not None
    # After a stop request, a stopping node can cause failures on other nodes.
    stop = run.stop if len(crews) > 1 else None
    folded = gang_lifecycle.fold(lives(crews, detail), attempt.cause, stop=stop, released=attempt.released)
    happened: list[Event] = []
    if is_word or folded.over is None:
        has_begun, had_begun = (all(crew.began for crew in these) for these in (crews, attempt.crews))
        is_start = has_begun and (not had_begun or State.STARTING in (run.state, run.life.before))
        happened += _on_its_way(run, folded, is_start=is_start)
    over = folded.over
    # A `GivenUp` event does not record the start of user code on other nodes.
    if isinstance(over, GivenUp) and len(crews) > 1:
        over = AttemptEnded(over.reason, began=folded.began)
    if over is not None:
        happened.append(over)
    return folded, happened


def is_folded(run: StoredRun) -> bool:
    """Return True if an unfinished attempt's stored state equals the combined state of its nodes."""
    attempt = run.attempt
    assert attempt is not None
    folded, happened = follow(run, attempt.crews, is_word=False)
    written = (attempt.cause, attempt.released, attempt.began)
    return not happened and (folded.cause, folded.releases, folded.began) == written


def _on_its_way(run: StoredRun, folded: Fold, *, is_start: bool) -> list[Event]:
    """Return the run events that precede the end of the run."""
    was_silent = run.state is State.UNREACHABLE
    if folded.state is State.UNREACHABLE:
        return [] if was_silent else [Silent()]
    happened: list[Event] = [Heard(folded.state)] if was_silent else []
    if is_start:
        happened.append(UserCodeStarted())
    known = run.life.before if was_silent else run.state
    if folded.state is State.STOPPING and known is not State.STOPPING:
        happened.append(Stopping())
    return happened


def _life(crew: StoredCrew, detail: str) -> gang_lifecycle.Crew:
    over = None
    if crew.ended_ns is not None and crew.reason is not None:
        over = Over(reason=crew.reason, began=crew.began, proven=crew.proven, given_up=crew.given_up, detail=detail)
    return gang_lifecycle.Crew(
        number=crew.number,
        state=crew.state,
        before=crew.before,
        began=crew.began,
        returned=crew.returned,
        halt=None if crew.halt_json is None else from_json(crew.halt_json, Halt),
        over=over,
    )


def _later(one: State, other: State) -> State:
    """Return the later of two lifecycle states, or UNREACHABLE if the first state is UNREACHABLE."""
    if one is State.UNREACHABLE:
        return one
    return max(one, other, key=_ORDER.index)
