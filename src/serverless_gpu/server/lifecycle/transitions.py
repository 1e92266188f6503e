"""Stores state transitions of runs and attempts.

Only this module changes the state of a run or an attempt.

    an event on a node ─▶ gangs.follow ─┐
    an event of a run ──────────────────┴─▶ model/run_lifecycle.advance
                     ─▶ compare and set ─▶ attempt, parts, events, orders   (one transaction)
                                             └─ after the commit: `Announcer.announce`

The transition table in `model/` makes the decisions. This module stores each transition in the rows of the run, its
attempt and the attempt's nodes, and adds an event. For a stop request, this module also adds an order for each node.
Each write checks that the stored run has not changed since the read. After a concurrent change, this module writes
nothing and raises `StaleAttempt`. The server never delivers start orders of an ended attempt, even if the node
reconnects later (`orders.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from enum import Enum
from functools import partial

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import AlreadyFinished
from serverless_gpu.model.lifecycle.attempt import ACTIVE, MEANINGS, STOPPED_BY, TERMINAL, Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Fold, Halt
from serverless_gpu.model.lifecycle.run_lifecycle import (
    INFRA_RETRIES_MAX,
    AttemptEnded,
    Event,
    Forgotten,
    GivenUp,
    Heard,
    Run,
    RunInstruction,
    RunPlaced,
    Silent,
    StopAsked,
    Stopping,
    advance,
    has_used_attempts,
    over_because,
)
from serverless_gpu.model.usage_policy import format_span
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import LEDGER, SCHEDULER, Hub, node_key, run_key
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.lifecycle import gangs
from serverless_gpu.server.records import attempts, audit, crews, events, orders, runs
from serverless_gpu.server.records.attempts import NewAttempt, StoredAttempt
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.crews import WITHOUT_REPORT, CrewId, NewCrew, StoredCrew
from serverless_gpu.server.records.events import StoredEvent
from serverless_gpu.server.records.runs import StoredRun

_log = logging.getLogger(__name__)
_Over = AttemptEnded | GivenUp | Forgotten
_NODE_CHARACTERS = 256


class TransitionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of a run after one or more events.

    Attributes:
        before: the state of the run before the event.
        life: the lifecycle of the run after the event.
        events: the stored rows about the event.
        looks: nodes that must report now, because the answer contains news.
    """

    before: StoredRun
    life: Run
    instructions: tuple[RunInstruction, ...] = ()
    events: tuple[StoredEvent, ...] = ()
    looks: tuple[StoredCrew, ...] = ()

    @property
    def changed(self) -> bool:
        """Return True if the event changed the run."""
        return self.life != self.before.life

    def count(self, measures: ServerMetrics) -> None:
        """Count the ended run and abandoned attempts in the metrics."""
        if RunInstruction.CONCLUDE in self.instructions and self.life.reason is not None:
            measures.ended.labels(self.life.reason.value).inc()
        for event in self.events:
            if event.reason in WITHOUT_REPORT:
                measures.given_up.labels(event.reason.value).inc()


class ReportRequests:
    """Attempts for which nodes must request news from the server by an immediate report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[str, set[CrewId]] = {}

    def ask(self, node_id: str, crew: CrewId) -> None:
        """Request an immediate report about an attempt from its node."""
        with self._lock:
            self._asked.setdefault(node_id, set()).add(crew)

    def of(self, node_id: str) -> tuple[CrewId, ...]:
        """Return the attempts on a node with an outstanding report request."""
        with self._lock:
            return tuple(sorted(self._asked.get(node_id, ())))

    def done(self, node_id: str, crew: CrewId) -> bool:
        """Remove the report request for an attempt, and return True if the request existed."""
        with self._lock:
            there = self._asked.get(node_id, set())
            was_asked = crew in there
            there.discard(crew)
            if not there:
                self._asked.pop(node_id, None)
            return was_asked

    def keep(self, ids: Collection[CrewId]) -> None:
        """Delete all report requests except those for the attempts in `ids`."""
        with self._lock:
            left = {node_id: own.intersection(ids) for node_id, own in self._asked.items()}
            self._asked = {node_id: own for node_id, own in left.items() if own}


class Announcer:
    """Wakes the components and clients that wait for a committed transition."""

    def __init__(self, *, hub: Hub, looks: ReportRequests, measures: ServerMetrics) -> None:
        self._hub = hub
        self._looks = looks
        self._measures = measures

    def announce(self, told: TransitionResult) -> None:
        """Notify listeners about a committed transition, and count the transition."""
        hub = self._hub
        for crew in told.looks:
            self._looks.ask(crew.node_id, crew.id)
            hub.touch(node_key(crew.node_id))
        if not told.changed:
            return
        told.count(self._measures)
        hub.touch(run_key(told.before.id))
        for event in told.events:
            with server_log.bound(run=event.run_id, attempt=event.fence, node=event.node):
                _log.info("%s%s", event.state.value, f" ({event.reason.value})" if event.reason is not None else "")
        attempt = told.before.attempt
        if RunInstruction.SEND_STOP in told.instructions and attempt is not None:
            for crew in attempt.open_crews:
                hub.touch(node_key(crew.node_id))
            if told.before.state is State.STARTING:
                hub.touch(SCHEDULER)  # If the start order is unsent, the scheduler ends the run immediately.
        if RunInstruction.REQUEUE in told.instructions or RunInstruction.CONCLUDE in told.instructions:
            hub.touch(SCHEDULER)
            hub.touch(LEDGER)


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Details of an event of a run.

    Attributes:
        at_ns: now, nanoseconds since 1970.
        detail: text in addition to the reason, when an attempt has ended.
        exec_ns: start of user code, nanoseconds since 1970, once known.
        node: name of the node on which the event happened; "" for all nodes of the attempt.
        returned: True if all ranks on the node have returned and wait for the ranks of other nodes.
        halt: reason why the node ends early, once the node has reported it.
    """

    at_ns: int
    detail: str = ""
    exec_ns: int | None = None
    node: str = ""
    returned: bool = False
    halt: Halt | None = None


class _Gang(msgspec.Struct, frozen=True, kw_only=True):
    """Attempt of an event, with the attempt's new rows for its nodes."""

    attempt: StoredAttempt
    crews: tuple[StoredCrew, ...]
    folded: Fold | None = None

    @property
    def changed(self) -> dict[int, dict[str, object]]:
        """Return the changed columns of the attempt's rows in `crews`, by node rank."""
        return {
            before.number: {
                name: value.value if isinstance(value, Enum) else value
                for name, value in msgspec.structs.asdict(crew).items()
                if value != getattr(before, name)
            }
            for before, crew in zip(self.attempt.crews, self.crews, strict=True)
            if crew != before
        }

    @property
    def is_new(self) -> bool:
        """Return True if the gang's other nodes must learn of the event."""
        fold, before = self.folded, self.attempt
        if self.crews[0].began and not before.crews[0].began:
            return True  # User code may now begin on the gang's other nodes, see `RendezvousService.told`.
        return fold is not None and (fold.cause != before.cause or fold.releases != before.released)

    @property
    def because(self) -> str:
        """Return the cause of a gang's early end, or "" if the cause is unknown or the gang has one node."""
        cause = self.folded.cause if self.folded is not None and len(self.crews) > 1 else None
        return "" if cause is None else gangs.cause_sentence(cause, self.attempt)

    @property
    def detail(self) -> str:
        """Return the cause of a gang's end as a suffix for the message of the end reason."""
        over = self.folded.over if self.folded is not None and len(self.crews) > 1 else None
        if self.folded is None or self.folded.cause is None or over is None:
            return ""
        return gangs.cause_sentence(self.folded.cause, self.attempt, after=over_because(over))

    @property
    def started_ns(self) -> int | None:
        """Return the earliest start of user code on any node of the attempt."""
        return min((crew.started_ns for crew in self.crews if crew.started_ns is not None), default=None)


def place(connection: sa.Connection, run: StoredRun, *, new: NewAttempt, on: Sequence[NewCrew], at_ns: int) -> int:
    """Place a waiting run, and store its attempt with one order per node before any process starts.

    Returns:
        The fence of the attempt.

    Raises:
        IllegalTransition: the run was not waiting when it was read.
        StaleAttempt: the run stopped waiting after the caller had read it.
    """
    life, _ = advance(run.life, RunPlaced())
    node = _short(", ".join(crew.node for crew in on))
    event = StoredEvent(
        run_id=run.id,
        seq=run.events + 1,
        fence=life.fence,
        at_ns=at_ns,
        state=life.state,
        sentence=f"placed on {node}",
        node=node,
    )
    changed = {"state": life.state.value, "fence": life.fence, "events": event.seq}
    runs.change(connection, run, **changed, gpu_type=runs.shortened_type(new.gpu_type))
    attempts.insert(connection, run.id, life.fence, new=new, at_ns=at_ns)
    crews.insert(connection, run.id, life.fence, on, at_ns=at_ns)
    events.add(connection, [event])
    for crew in on:
        orders.add_start(connection, crew.node_id, (run.id, life.fence, crew.number), at_ns=at_ns)
    return life.fence


def apply(connection: sa.Connection, run: StoredRun, *happened: Event, note: Note) -> TransitionResult:
    """Apply events to a run, in order. Write rows only if a state changes.

    Apply events of an attempt to all of its nodes.

    Args:
        run: the run as read in this transaction.
        happened: any events except `RunPlaced`.
        note: details of the events.

    Raises:
        IllegalTransition: the event is impossible in this state of the run; the function changed nothing.
        StaleAttempt: the stored run has changed since it was read; the function changed nothing.
    """
    attempt = run.attempt if run.state in ACTIVE else None
    if attempt is None:
        return _tell(connection, run, happened, gang=None, note=note)
    there = tuple(_after(crew, happened, note) for crew in attempt.crews)
    return _tell(connection, run, happened, gang=_Gang(attempt=attempt, crews=there), note=note)


def apply_to_crew(
    connection: sa.Connection, run: StoredRun, number: int, *happened: Event, note: Note
) -> TransitionResult:
    """Apply events to a run's attempt on one node, in order. Write rows only if a state changes.

    Args:
        run: the run as read in this transaction, with an unfinished attempt.
        number: rank of the node in the attempt.
        happened: events on the node; neither `RunPlaced` nor requests to the run.
        note: details of the events.
    """
    attempt = run.attempt
    assert attempt is not None and run.state in ACTIVE
    news = partial(gangs.with_report, returned=note.returned, halt=note.halt)
    there = tuple(_after(news(crew), happened, note) if crew.number == number else crew for crew in attempt.crews)
    is_word = not any(isinstance(event, GivenUp | Forgotten) for event in happened)
    folded, follows = gangs.follow(run, there, is_word=is_word, detail=note.detail)
    gang = _Gang(attempt=attempt, crews=there, folded=folded)
    note = msgspec.structs.replace(note, node=note.node or attempt.crews[number].node)
    if folded.cause is not None and len(there) > 1 and folded.over is not None:
        note = msgspec.structs.replace(note, detail=gang.detail)
    told = _tell(connection, run, follows, gang=gang, note=note)
    looks = tuple(crew for crew in there if gang.is_new and crew.number != number and crew.ended_ns is None)
    return msgspec.structs.replace(told, looks=looks)


def _after(crew: StoredCrew, happened: Sequence[Event], note: Note) -> StoredCrew:
    for event in happened:
        crew = gangs.after(crew, event, at_ns=note.at_ns, exec_ns=note.exec_ns)
    return crew


def _tell(
    connection: sa.Connection, run: StoredRun, happened: Sequence[Event], *, gang: _Gang | None, note: Note
) -> TransitionResult:
    told = TransitionResult(before=run, life=run.life)
    over: _Over | None = None
    for event in happened:
        life, issued = advance(told.life, event)
        if isinstance(event, AttemptEnded | GivenUp | Forgotten):
            over = event
            note = _with_limit(run, over, note)
            if why := _given_up_because(run, life, over):
                note = msgspec.structs.replace(note, detail=why)
        written = told.events
        if life.state is not told.life.state or issued:
            because = gang.because if gang is not None and isinstance(event, Stopping | Heard) else ""
            written += (_event(run, life, event, note=note, seq=run.events + len(written) + 1, because=because),)
        told = TransitionResult(before=run, life=life, instructions=told.instructions + issued, events=written)
    if told.changed:
        _write_run(connection, told, gang, over=over, note=note)
    if gang is not None and (told.changed or gang.changed):
        _write_attempt(connection, gang, told, over=over, note=note)
    return told


def add_remark(connection: sa.Connection, run_id: str, fence: int, sentence: str, *, at_ns: int) -> bool:
    """Add an event without a state change to a run, for example a budget warning.

    Returns:
        True if the event was written.
    """
    run = runs.find(connection, run_id)
    if run is None or run.fence != fence or run.state not in ACTIVE:
        return False
    node = _short(run.attempt.node) if run.attempt is not None else ""
    event = StoredEvent(
        run_id=run.id, seq=run.events + 1, fence=fence, at_ns=at_ns, state=run.state, sentence=sentence, node=node
    )
    runs.change(connection, run, events=event.seq)
    events.add(connection, [event])
    return True


def settle(connection: sa.Connection, crew: CrewId, *, receipt: str | None, at_ns: int) -> bool:
    """Store the receipt of an attempt that ended on a node, or record that the receipt is missing.

    Returns:
        True if the call changed a row.
    """
    run_id, fence, _ = crew
    news = crews.settle(connection, crew, receipt=receipt, at_ns=at_ns)
    if news:
        is_settled = attempts.settle(connection, run_id, fence, at_ns=at_ns)
    else:
        is_settled = not crews.is_any_unsettled(connection, run_id, fence)
    return (is_settled and runs.settle(connection, run_id, fence, at_ns=at_ns)) or news


def settle_all(connection: sa.Connection, attempt: StoredAttempt, *, at_ns: int) -> None:
    """Settle an ended attempt without receipts from its nodes."""
    for crew in attempt.crews:
        settle(connection, crew.id, receipt=None, at_ns=at_ns)


def reason_sentence(reason: Reason, detail: str) -> str:
    """Return the reason why an attempt or run ended, as a sentence for users."""
    sentence = MEANINGS[reason].sentence
    return f"{sentence}: {detail}" if detail else sentence


def _write_run(
    connection: sa.Connection, told: TransitionResult, gang: _Gang | None, *, over: _Over | None, note: Note
) -> None:
    run, life = told.before, told.life
    values: dict[str, object] = {
        "state": life.state.value,
        "stop": life.stop.value if life.stop else None,
        "events": run.events + len(told.events),
    }
    if gang is not None and gang.started_ns is not None and run.started_ns is None:
        values["started_ns"] = gang.started_ns
    if RunInstruction.SEND_STOP in told.instructions:
        values["detail"] = note.detail  # Users see the reason for the stop request before and after the end of the run.
    if RunInstruction.CONCLUDE in told.instructions:
        nothing_to_come = gang is None or all(crew.settled_ns is not None for crew in gang.crews)
        detail = _asked_because(run, life.reason) or note.detail
        values |= {
            "reason": life.reason.value if life.reason else None,
            "detail": detail,
            "said": runs.searchable(reason_sentence(life.reason, detail) if life.reason else detail),
            "unsaved": life.unsaved,
            "ended_ns": note.at_ns,
            "settled_ns": note.at_ns if nothing_to_come else None,
        }
    if RunInstruction.REQUEUE in told.instructions:
        started_ns = None if gang is None else gang.started_ns
        ran_ms = 0 if started_ns is None else max(0, note.at_ns - started_ns) // 1_000_000
        values |= {
            "retries_used": run.spec.retries - life.retries_left,
            "infra_retries_used": INFRA_RETRIES_MAX - life.infra_left,
            "fault_retries_used": run.fault_retries_used + run.life.faults_left - life.faults_left,
            "detail": "",
            "unsaved": life.unsaved,
            "ran": life.ran,
            "ran_ms": run.ran_ms + ran_ms,
        }
        if over is not None and over_because(over) is Reason.TIMEOUT:
            # After a run has used its time slice, the scheduler starts other waiting runs first.
            values["queued_ns"] = note.at_ns
    runs.change(connection, run, **values)
    events.add(connection, told.events)


def _with_limit(run: StoredRun, over: _Over, note: Note) -> Note:
    """Add the exceeded time limit of a usage policy to the note."""
    spec = run.spec_now
    if over_because(over) is not Reason.TIMEOUT or not spec.is_capped or spec.max_run_s is None or note.detail:
        return note
    by = spec.limited_by
    detail = f"{by} limits an attempt to {format_span(spec.max_run_s)}"
    if run.is_last and spec.total_run_s is not None:
        detail = f"{by} limits all attempts of a run together to {format_span(spec.total_run_s)}"
    return msgspec.structs.replace(note, detail=detail)


def _given_up_because(run: StoredRun, life: Run, over: _Over) -> str:
    """Return the exhausted limit that prevents another attempt of the run, or ""."""
    if life.reason is None or run.stop is not None:
        return ""
    last = MEANINGS[over_because(over)].sentence
    if life.reason is Reason.NO_PROGRESS:
        return (
            f"{life.unsaved} in a row; the last attempt ended with: {last}. Save checkpoints in "
            "runtime.checkpoint_dir(); other files do not count"
        )
    if life.began and MEANINGS[over_because(over)].state is not State.SUCCEEDED and has_used_attempts(life):
        return f"{run.spec.limited_by}: at most {run.spec.attempts_max} attempts"
    return ""


def _asked_because(run: StoredRun, reason: Reason | None) -> str:
    """Return the stop request's reason if the request ended the run or its attempt, else ""."""
    return run.detail if run.stop is not None and STOPPED_BY[run.stop] is reason else ""


def _write_attempt(
    connection: sa.Connection, gang: _Gang, told: TransitionResult, *, over: _Over | None, note: Note
) -> None:
    life, attempt, of_crews = told.life, gang.attempt, gang.changed
    values: dict[str, object] = {"began": attempt.began or any(crew.began for crew in gang.crews)}
    if attempt.started_ns is None and gang.started_ns is not None:
        values["started_ns"] = gang.started_ns
    if gang.folded is not None and gang.folded.cause != attempt.cause:
        values["cause_json"] = msgspec.json.encode(gang.folded.cause).decode()
    if gang.folded is not None and gang.folded.releases and len(gang.crews) > 1:
        values["released"] = True
    for number, own in of_crews.items():
        if "ended_ns" in own:
            reason = gang.crews[number].reason
            # The reason for the stop request replaces the node's last message.
            own["sentence"] = _asked_because(told.before, reason)
    if over is None:
        before = life.before.value if life.before else None
        values |= {"state": life.state.value, "before": before}
    else:
        reason = over_because(over)
        values |= {"state": MEANINGS[reason].state.value, "before": None, "reason": reason.value}
        values["ended_ns"] = note.at_ns
        for crew in attempt.crews:
            # The end reason of the attempt determines the charges for all of its nodes.
            of_crews.setdefault(crew.number, {})["uncharged"] = True
        if all(crew.settled_ns is not None for crew in gang.crews):
            values["settled_ns"] = note.at_ns
    attempts.change(connection, attempt, of_crews=of_crews, **values)
    if over is None and life.stop is not None and RunInstruction.SEND_STOP in told.instructions:
        for crew in attempt.open_crews:
            orders.add_stop(connection, crew.node_id, crew.id, why=life.stop, at_ns=note.at_ns)


def _short(nodes: str) -> str:
    """Truncate a list of node names to the maximum length in an event."""
    return nodes if len(nodes) <= _NODE_CHARACTERS else f"{nodes[: _NODE_CHARACTERS - 1]}…"


def _event(run: StoredRun, life: Run, event: Event, *, note: Note, seq: int, because: str) -> StoredEvent:
    over = over_because(event) if isinstance(event, AttemptEnded | GivenUp | Forgotten) else None
    node = _short(run.attempt.node) if run.attempt is not None and run.state in ACTIVE else ""
    return StoredEvent(
        run_id=run.id,
        seq=seq,
        fence=life.fence,
        at_ns=note.at_ns,
        state=life.state,
        reason=life.reason or over,
        sentence=because
        or _sentence(event, life, node=note.node or node, detail=_asked_because(run, over) or note.detail),
        node=node,
    )


def _sentence(event: Event, life: Run, *, node: str, detail: str) -> str:
    """Return the message that describes an event to users."""
    match event:
        case Silent():
            return f"no report from {node}; the run may still be running"
        case Heard():
            return f"{node} answers again"
        case StopAsked() if life.reason is None:
            return f"asked to stop: {event.why}{f': {detail}' if detail else ''}"
        case AttemptEnded() | GivenUp() | Forgotten() if life.state is State.QUEUED:
            return (
                f"attempt {life.fence} has ended: {reason_sentence(over_because(event), detail)}; the run waits "
                "for another attempt"
            )
    return reason_sentence(life.reason, detail) if life.reason else ""


def ask_to_stop(
    connection: sa.Connection, run_id: str, *, who: Caller, why: StopReason, at_ns: int, because: str = ""
) -> TransitionResult | None:
    """Store a stop request for a run.

    Return None if the run already has a stop request with the same reason.
    """
    run = runs.find(connection, run_id)
    if run is None or run.state in TERMINAL:
        if run is not None and run.stop is why:
            return None
        state = "gone" if run is None else run.state
        raise AlreadyFinished(f"run {run_id} has already ended as {state}", hint="an ended run cannot be stopped")
    told = apply(connection, run, StopAsked(why), note=Note(at_ns=at_ns, detail=because))
    if told.changed:
        detail = {"reason": why.value, "fence": run.fence} | ({"because": because} if because else {})
        audit.record(connection, who=who, action=Action.RUN_STOP, subject=run_id, now_ns=at_ns, detail=detail)
    return told
