"""What happens to a run, written down: the one place where its state changes.

    what happened ─▶ model/run_lifecycle.advance ─▶ compare and set ─▶ attempt, events, orders   (one transaction)
                                                                          └─ after the commit: `Told.announce`

The decision is the table's. Here it becomes rows: the run as it was expected to be (else somebody was faster, nothing
is changed and `StaleAttempt` is raised), its attempt, one event for each change, and an order for the node when the run
is to stop. Orders of an attempt that is over are not delivered any more (`orders.py`): a node that comes back late
finds nothing to start.
"""

from __future__ import annotations

import logging

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.attempt import ACTIVE, MEANINGS, STOPPED_BY, Reason, State
from serverless_gpu.model.policy import format_span
from serverless_gpu.model.run_lifecycle import (
    INFRA_RETRIES_MAX,
    Ended,
    Event,
    Forgotten,
    GivenUp,
    Heard,
    Instruction,
    Placed,
    Run,
    Silent,
    StopAsked,
    advance,
    over_because,
)
from serverless_gpu.server import attempts, events, log_context, orders, runs
from serverless_gpu.server.attempts import NewAttempt, StoredAttempt
from serverless_gpu.server.events import StoredEvent
from serverless_gpu.server.hub import LEDGER, SCHEDULER, node_key, run_key
from serverless_gpu.server.measures import Measures
from serverless_gpu.server.runs import StoredRun
from serverless_gpu.server.services import Services

_log = logging.getLogger(__name__)
_Over = Ended | GivenUp | Forgotten


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What followed from something that happened.

    Attributes:
        before: the run as it was.
        life: what it is now.
        events: what was written about it.
    """

    before: StoredRun
    life: Run
    instructions: tuple[Instruction, ...] = ()
    events: tuple[StoredEvent, ...] = ()

    @property
    def changed(self) -> bool:
        """Return whether anything was written."""
        return self.life != self.before.life

    def announce(self, services: Services) -> None:
        """Wake whoever waits for this, and count it; after the commit."""
        if not self.changed:
            return
        hub = services.hub
        self.count(services.measures)
        hub.touch(run_key(self.before.id))
        for event in self.events:
            with log_context.bound(run=event.run_id, attempt=event.fence, node=event.node):
                _log.info("%s%s", event.state.value, f" ({event.reason.value})" if event.reason is not None else "")
        attempt = self.before.attempt
        if Instruction.SEND_STOP in self.instructions and attempt is not None:
            hub.touch(node_key(attempt.node_id))
        if Instruction.REQUEUE in self.instructions or Instruction.CONCLUDE in self.instructions:
            hub.touch(SCHEDULER)
            hub.touch(LEDGER)

    def count(self, measures: Measures) -> None:
        """Count it, and wake nobody: there are no services yet."""
        if Instruction.CONCLUDE in self.instructions and self.life.reason is not None:
            measures.ended.labels(self.life.reason.value).inc()
        for event in self.events:
            if event.reason in attempts.WITHOUT_REPORT:
                measures.given_up.labels(event.reason.value).inc()


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What is known beside what happened.

    Attributes:
        at_ns: now, nanoseconds since 1970.
        detail: beyond the reason, when an attempt is over.
        exec_ns: when user code began, nanoseconds since 1970, once that is known.
    """

    at_ns: int
    detail: str = ""
    exec_ns: int | None = None


def place(connection: sa.Connection, run: StoredRun, *, new: NewAttempt, node: str, at_ns: int) -> int:
    """Write that a run that waits is to start on a node, and the order for the node: the intent, before the effect.

    Args:
        run: as it was read in this transaction.
        new: the attempt.
        node: the node's name.
        at_ns: now, nanoseconds since 1970.

    Returns:
        The fence of the attempt.

    Raises:
        IllegalTransition: the run does not wait.
        StaleAttempt: it does not wait any more.
    """
    life, _ = advance(run.life, Placed())
    event = StoredEvent(
        run_id=run.id,
        seq=run.events + 1,
        fence=life.fence,
        at_ns=at_ns,
        state=life.state,
        sentence=f"placed on {node}",
        node=node,
    )
    runs.change(connection, run, state=life.state.value, fence=life.fence, events=event.seq)
    attempts.insert(connection, run.id, life.fence, new=new, at_ns=at_ns)
    events.add(connection, [event])
    orders.add_start(connection, new.node_id, run.id, life.fence, at_ns=at_ns)
    return life.fence


def tell(connection: sa.Connection, run: StoredRun, *happened: Event, note: Note) -> Told:
    """Write what follows from what happened to a run, in order; nothing, when nothing follows.

    Args:
        run: as it was read in this transaction.
        happened: anything but `Placed`.
        note: what else is known.

    Raises:
        IllegalTransition: it cannot have happened to a run in this state; nothing was changed.
        StaleAttempt: the run is not any more as it was read; nothing was changed.
    """
    attempt = run.attempt if run.state in ACTIVE else None
    told = Told(before=run, life=run.life)
    over: _Over | None = None
    for event in happened:
        life, issued = advance(told.life, event)
        if isinstance(event, Ended | GivenUp | Forgotten):
            over = event
            note = _with_limit(run, over, note)
        written = told.events
        if life.state is not told.life.state or issued:
            written += (_event(run, life, event, note=note, seq=run.events + len(written) + 1),)
        told = Told(before=run, life=life, instructions=told.instructions + issued, events=written)
    if told.changed:
        _write_run(connection, told, over=over, note=note)
        if attempt is not None:
            _write_attempt(connection, attempt, told, over=over, note=note)
    return told


def remark(connection: sa.Connection, run_id: str, fence: int, sentence: str, *, at_ns: int) -> bool:
    """Write an event that changes nothing, and says something to whoever looks: a budget is nearly used up.

    Args:
        run_id: a run that goes on; nothing is written of one that has ended, or is at another attempt.
        fence: of that attempt.
        sentence: what is said.
        at_ns: now, nanoseconds since 1970.

    Returns:
        Whether it was written.
    """
    run = runs.find(connection, run_id)
    if run is None or run.fence != fence or run.state not in ACTIVE:
        return False
    node = run.attempt.node if run.attempt is not None else ""
    event = StoredEvent(
        run_id=run.id, seq=run.events + 1, fence=fence, at_ns=at_ns, state=run.state, sentence=sentence, node=node
    )
    runs.change(connection, run, events=event.seq)
    events.add(connection, [event])
    return True


def settle(connection: sa.Connection, run_id: str, fence: int, *, receipt: str | None, at_ns: int) -> bool:
    """Write the receipt of an attempt that has ended, or that none will come any more.

    Returns:
        Whether that is news.
    """
    news = attempts.settle(connection, run_id, fence, receipt=receipt, at_ns=at_ns)
    return runs.settle(connection, run_id, fence, at_ns=at_ns) or news


def told_as(reason: Reason, detail: str) -> str:
    """Return why something ended, for people."""
    sentence = MEANINGS[reason].sentence
    return f"{sentence}: {detail}" if detail else sentence


def _write_run(connection: sa.Connection, told: Told, *, over: _Over | None, note: Note) -> None:
    run, life = told.before, told.life
    values: dict[str, object] = {
        "state": life.state.value,
        "stop": life.stop.value if life.stop else None,
        "events": run.events + len(told.events),
    }
    if note.exec_ns is not None and run.started_ns is None:
        values["started_ns"] = note.exec_ns
    if Instruction.SEND_STOP in told.instructions:
        values["detail"] = note.detail  # why it is to stop, for those who look meanwhile and at its end
    if Instruction.CONCLUDE in told.instructions:
        nothing_to_come = not isinstance(over, Ended)
        values |= {
            "reason": life.reason.value if life.reason else None,
            "detail": _asked_because(run, life.reason) or note.detail,
            "ended_ns": note.at_ns,
            "settled_ns": note.at_ns if nothing_to_come else None,
        }
    if Instruction.REQUEUE in told.instructions:
        values |= {
            "retries_used": run.spec.retries - life.retries_left,
            "infra_retries_used": INFRA_RETRIES_MAX - life.infra_left,
            "fault_retries_used": run.fault_retries_used + run.life.faults_left - life.faults_left,
            "detail": "",
        }
        if over is not None and over_because(over) is Reason.TIMEOUT:
            values["queued_ns"] = note.at_ns  # it had its time, and others come first
    runs.change(connection, run, **values)
    events.add(connection, told.events)


def _with_limit(run: StoredRun, over: _Over, note: Note) -> Note:
    """Return a note that says which limit an attempt has reached, where that is not the one that its user set."""
    spec = run.spec
    if over_because(over) is not Reason.TIMEOUT or not spec.is_capped or spec.max_run_s is None or note.detail:
        return note
    by = f"usage policy {spec.policy!r}" if spec.policy else "this server"
    detail = f"{by} lets an attempt run for {format_span(spec.max_run_s)}"
    return msgspec.structs.replace(note, detail=detail)


def _asked_because(run: StoredRun, reason: Reason | None) -> str:
    """Return why a run was asked to stop, where that is what ended it, or its attempt."""
    return run.detail if run.stop is not None and STOPPED_BY[run.stop] is reason else ""


def _write_attempt(
    connection: sa.Connection, attempt: StoredAttempt, told: Told, *, over: _Over | None, note: Note
) -> None:
    life = told.life
    values: dict[str, object] = {"started_ns": note.exec_ns} if note.exec_ns is not None else {}
    if over is None:
        before = life.before.value if life.before else None
        values |= {"state": life.state.value, "before": before, "began": life.began}
    else:
        reason = over_because(over)
        values |= {"state": MEANINGS[reason].state.value, "before": None, "reason": reason.value, "uncharged": True}
        values |= {"began": attempt.began or (isinstance(over, Ended) and over.began), "ended_ns": note.at_ns}
        values["sentence"] = _asked_because(told.before, reason)  # what is said of it from now on
        if not isinstance(over, Ended):
            values["settled_ns"] = note.at_ns
    attempts.change(connection, attempt, **values)
    if over is None and life.stop is not None and Instruction.SEND_STOP in told.instructions:
        to = (attempt.node_id, attempt.run_id, attempt.fence)
        orders.add_stop(connection, *to, why=life.stop, at_ns=note.at_ns)


def _event(run: StoredRun, life: Run, event: Event, *, note: Note, seq: int) -> StoredEvent:
    over = over_because(event) if isinstance(event, Ended | GivenUp | Forgotten) else None
    node = run.attempt.node if run.attempt is not None and run.state in ACTIVE else ""
    return StoredEvent(
        run_id=run.id,
        seq=seq,
        fence=life.fence,
        at_ns=note.at_ns,
        state=life.state,
        reason=life.reason or over,
        sentence=_sentence(event, life, node=node, detail=_asked_because(run, over) or note.detail),
        node=node,
    )


def _sentence(event: Event, life: Run, *, node: str, detail: str) -> str:
    """Return what people read about a change."""
    match event:
        case Silent():
            return f"no word from {node}; the run may well be going on"
        case Heard():
            return f"{node} answers again"
        case StopAsked() if life.reason is None:
            return f"asked to stop: {event.why}{f': {detail}' if detail else ''}"
        case Ended() | GivenUp() | Forgotten() if life.state is State.QUEUED:
            return f"attempt {life.fence} is over: {told_as(over_because(event), detail)}; it waits for another"
    return told_as(life.reason, detail) if life.reason else ""
