"""Converts database rows of runs to the messages of `wire/runs.py`.

`visible` raises the same `NotFound` for missing runs and for hidden runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import format_soon_zoned, format_utc
from serverless_gpu.errors import NotFound
from serverless_gpu.model import access_control
from serverless_gpu.model.lifecycle.attempt import TERMINAL, Reason, State
from serverless_gpu.model.receipt import nodes_text
from serverless_gpu.model.spec import Function
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.lifecycle import endings, gangs
from serverless_gpu.server.lifecycle.endings import EarlyEnding, Quiet
from serverless_gpu.server.lifecycle.transitions import reason_sentence
from serverless_gpu.server.records import events, files, runs
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.crews import CrewOutcome
from serverless_gpu.server.records.events import StoredEvent
from serverless_gpu.server.records.files import StoredFile
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.runs.run_stream import RunSnapshot
from serverless_gpu.server.scheduling.wait_reasons import NOTHING, WaitNotice
from serverless_gpu.wire.base import Json
from serverless_gpu.wire.queue import wait_view
from serverless_gpu.wire.runs import (
    AttemptView,
    CrewView,
    EndedMessage,
    FileView,
    RunView,
    SettledMessage,
    StateMessage,
)


def visible(connection: sa.Connection, run_id: str, *, who: Caller, reach: str) -> StoredRun:
    """Return a run, or raise `NotFound` if the caller may not see the run."""
    run = runs.find(connection, run_id)
    if run is None or not in_reach(run, who=who, reach=reach):
        raise NotFound(f"there is no run {run_id[:40]!r} that you may see", hint="list your runs with `sgpu runs`")
    return run


def in_reach(run: StoredRun, *, who: Caller, reach: str) -> bool:
    """Return True if the caller may see a run."""
    return access_control.covers(reach, name=who.name, teams=who.teams, owner=run.owner, team=run.team)


def run_view(run: StoredRun, *, told: WaitNotice = NOTHING, deduplicated: bool = False, reader: str = "") -> RunView:
    """Return the API view of a run.

    The view contains the snapshot's address only for the owner, because the address gives access to the code.
    """
    attempt, spec, said = run.attempt, run.spec, sentence(run, waits_for=told.sentence)
    if isinstance(spec.payload, Function) and spec.payload.call is not None:
        # Omit the digests of the pickled call, because any user can read the call with these digests (`submission.py`).
        spec = msgspec.structs.replace(spec, payload=Function())
    return RunView(
        id=run.id,
        name=run.name,
        state=run.state,
        reason=run.reason,
        sentence=said if run.reason is not None else "; ".join(filter(None, (told.trouble, said))),
        fence=run.fence,
        owner=run.owner,
        team=run.team,
        pool=run.pool,
        node=attempt.node if attempt is not None and run.state is not State.QUEUED else "",
        gpu_type=(attempt.gpu_type if attempt is not None else run.spec.resources.gpu_type) or "",
        world_size=attempt.world_size if attempt is not None else run.spec.resources.gpus or 0,
        created_ns=run.created_ns,
        started_ns=run.started_ns,
        ended_ns=run.ended_ns,
        stop=run.stop,
        spec=spec,
        snapshot=run.snapshot if reader == run.owner else "",
        deduplicated=deduplicated,
        finished=run.finished,
        tracked=run.tracked,
        waiting=wait_view(told.wait) if told.wait is not None and run.state is State.QUEUED else None,
        crews=crew_views(attempt) if attempt is not None and run.state is not State.QUEUED else (),
    )


def crew_views(attempt: StoredAttempt) -> tuple[CrewView, ...]:
    """Return the views of an attempt's nodes, or an empty tuple for an attempt on one node."""
    if attempt.num_nodes == 1:
        return ()
    return tuple(
        CrewView(
            number=crew.number,
            node=crew.node,
            state=crew.state,
            reason=crew.reason,
            first_rank=crew.first_rank,
            gpus=crew.gpus,
            sentence=crew.sentence,
            heard_ns=crew.lease_ns,
            started_ns=crew.started_ns,
            ended_ns=crew.ended_ns,
        )
        for crew in attempt.crews
    )


def sentence(run: StoredRun, *, waits_for: str = "") -> str:
    """Return the status sentence of a run: its wait reason, its node's message, or its end reason."""
    attempt = run.attempt
    if run.reason is not None:
        return reason_sentence(run.reason, run.detail)
    if run.state is State.QUEUED or attempt is None:
        return waits_for
    if run.state is State.UNREACHABLE:
        silent = [crew for crew in attempt.open_crews if crew.state is State.UNREACHABLE] or attempt.crews
        names, since_ns = ", ".join(crew.node for crew in silent), min(crew.lease_ns for crew in silent)
        return f"no report from {names} since {format_utc(since_ns)}; the run may still be running"
    if attempt.num_nodes > 1 and attempt.cause is not None and run.stop is None:
        return gangs.cause_sentence(attempt.cause, attempt)
    if run.state is State.STOPPING and run.stop is not None:
        return attempt.sentence or f"asked to stop: {run.stop}{f': {run.detail}' if run.detail else ''}"
    leaving = [
        f"must leave {crew.node} at {format_soon_zoned(crew.leave_ns)}, when the node is no longer shared"
        for crew in attempt.open_crews
        if crew.leave_ns is not None
    ]
    said = "; ".join(filter(None, (*leaving, attempt.sentence)))
    have_met = attempt.num_nodes == 1 or run.state is not State.STARTING or attempt.chosen_json is not None
    if said or have_met:
        return said
    return f"{nodes_text([crew.node for crew in attempt.crews])} prepare and connect to each other"


def attempt_view(attempt: StoredAttempt) -> AttemptView:
    """Return the API view of an attempt."""
    return AttemptView(
        fence=attempt.fence,
        state=attempt.state,
        reason=attempt.reason,
        node=attempt.node,
        created_ns=attempt.created_ns,
        started_ns=attempt.started_ns,
        ended_ns=attempt.ended_ns,
        secrets=tuple(one.text for one in attempt.secrets),
        sentence=attempt.sentence if attempt.reason is not None else "",
        crews=crew_views(attempt),
    )


def file_views(found: Iterable[StoredFile]) -> tuple[FileView, ...]:
    """Return the views of output files with their contents."""
    return tuple(FileView(name=file.name, size=file.size, inline=file.inline) for file in found)


def state_message(event: StoredEvent) -> StateMessage:
    """Convert a stored event to a stream message."""
    return StateMessage(
        seq=event.seq,
        fence=event.fence,
        state=event.state,
        reason=event.reason,
        sentence=event.sentence,
        node=event.node,
        at_ns=event.at_ns,
    )


def ended_message(run: StoredRun, outcome: CrewOutcome, found: Sequence[StoredFile]) -> EndedMessage:
    """Return the ending message of a run, with its last event, its nodes' reports, and its files."""
    return EndedMessage(
        seq=run.events,
        fence=run.fence,
        state=run.state,
        reason=run.reason or Reason.NODE_LOST,
        sentence=sentence(run),
        ending=_json(outcome.stopped),
        files=file_views(found),
    )


def early_message(run: StoredRun, told: EarlyEnding, found: Sequence[StoredFile]) -> EndedMessage:
    """Return the early ending message of a run, which precedes the last event."""
    return EndedMessage(
        seq=0,
        fence=run.fence,
        state=told.state,
        reason=told.reason,
        sentence=reason_sentence(told.reason, told.sentence),
        ending=_json(told.stopped),
        files=file_views(found),
    )


def settled_message(outcome: CrewOutcome) -> SettledMessage:
    """Return the last stream message of a run, which contains the receipt."""
    return SettledMessage(receipt=_json(outcome.receipt))


def look(
    connection: sa.Connection, run_id: str, after: int, *, told: WaitNotice = NOTHING, quiet: Quiet = lambda crew: None
) -> RunSnapshot:
    """Return the state of a run and the events that a stream's reader has not received."""
    run = runs.find(connection, run_id)
    if run is None:
        raise NotFound(f"there is no run {run_id[:40]!r}")
    messages = tuple(state_message(event) for event in events.after(connection, run_id, after))
    if run.state not in TERMINAL:
        early = endings.early(connection, run, quiet)
        return RunSnapshot(
            run=run_view(run, told=told),
            events=messages,
            early=None
            if early is None
            else early_message(run, early, files.of_attempt(connection, run.id, run.fence, prefix="failures/")),
            may_be_early=early is None and endings.may_be_early(run),
        )
    outcome = endings.outcome(connection, run.attempt)
    found = files.of_attempt(connection, run_id, run.fence) if run.events > after else []
    return RunSnapshot(
        run=run_view(run),
        events=tuple(message for message in messages if message.seq < run.events),
        ended=ended_message(run, outcome, found),
        settled=settled_message(outcome) if run.finished else None,
    )


def _json(text: str | None) -> Json:
    return msgspec.UNSET if text is None else msgspec.Raw(text.encode())
