"""What is always true is found true of what a server wrote, and found out when it is not: one broken book for each."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import Any, Protocol

import pytest
import sqlalchemy as sa

from serverless_gpu.model.lifecycle import run_lifecycle
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import (
    AttemptEnded,
    Event,
    Forgotten,
    GivenUp,
    Heard,
    Restored,
    RunPlaced,
    Silent,
    StopAsked,
    Stopping,
    Unsatisfiable,
    UserCodeStarted,
)
from serverless_gpu.server.billing import charging
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import invariant_inputs
from serverless_gpu.server.invariants.invariant_inputs import RecordedRuns
from serverless_gpu.server.invariants.run_invariants import MOVES, History, LiveState, Stretch, violations
from serverless_gpu.server.invariants.self_check import check
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.records import attempts, audit, events, facts, files, runs
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.events import StoredEvent
from serverless_gpu.server.records.files import StoredFile
from tests.support.golden import golden
from tests.support.server.invariants import WHO, WHOLE, finished, ledger, submitted
from tests.support.server.stored import T0, S, add_node, add_people, place, tell


@pytest.fixture
def people(database: Database) -> Database:
    add_people(database, "alice")
    add_node(database)
    return database


def found(database: Database, history: History | None = None) -> set[tuple[str, str]]:
    return {(one.invariant, one.sentence) for one in check(database.read, history=history, limit=2).violations}


def test_nothing_is_wrong_with_what_a_server_wrote(people: Database) -> None:
    whole = finished(people)
    waiting, started, cancelled, lost = (submitted(people) for _ in range(4))
    place(people, started)
    people.write(lambda c: transitions.ask_to_stop(c, cancelled, who=WHO, why=StopReason.CANCEL, at_ns=T0 + S))
    place(people, lost)
    tell(people, lost, GivenUp(Reason.NODE_GONE))
    history = History(
        acknowledged=frozenset({whole, waiting, started, cancelled, lost}),
        ends={whole: (State.SUCCEEDED, Reason.COMPLETED), cancelled: (State.CANCELLED, Reason.CANCELLED)},
        changed={(Action.RUN_STOP, cancelled): 1, (Action.RUN_CREATE, whole): 1},
    )
    checked = check(people.read, history=history, limit=2)
    assert (checked.violations, checked.runs, checked.skipped) == ((), 5, ())


@pytest.mark.parametrize(("tariff", "micros"), [("{}", "null"), ('{"gpu_micros_per_hour": 1}', "0")])
def test_an_attempt_without_facts_costs_what_its_receipt_says(people: Database, tariff: str, micros: str) -> None:
    run_id = submitted(people)
    place(people, run_id)
    tell(people, run_id, UserCodeStarted(), AttemptEnded(Reason.COMPLETED, began=True))
    receipt = f'{{"gpu_ms": 0, "facts": 0, "micros": {micros}, "bill": {{}}}}'

    def write(connection: sa.Connection) -> None:
        attempts.note(connection, run_id, 1, tariff_json=tariff)
        transitions.settle(connection, (run_id, 1, 0), receipt=receipt, at_ns=T0 + 9 * S)
        due = charging.load(connection, [(run_id, 1, 0)], currency="USD")
        charging.charge(connection, due, at_ns=T0 + 10 * S, final_before_ns=0)

    people.write(write)
    assert not {sentence for invariant, sentence in found(people) if invariant == "I7"}


def set_in(table: sa.Table, **values: object) -> Break:
    """Return what writes values into the rows of a run, past everything that guards them."""
    key = table.c.id if table is tables.runs else table.c.subject if table is tables.audit else table.c.run_id

    def write(connection: sa.Connection, run_id: str) -> None:
        connection.execute(table.update().where(key == run_id).values(**values))

    return write


def doubled(connection: sa.Connection, run_id: str) -> None:
    """Write an entry of the ledger once more, under the next number."""
    row = dict(
        connection.execute(sa.select(tables.charges).where(tables.charges.c.run_id == run_id)).mappings().all()[0]
    )
    del row["seq"]
    connection.execute(tables.charges.insert(), row | {"number": 2})


def without(table: sa.Table, *which: sa.ColumnElement[bool]) -> Break:
    key = table.c.id if table is tables.runs else table.c.subject if table is tables.audit else table.c.run_id

    def write(connection: sa.Connection, run_id: str) -> None:
        connection.execute(table.delete().where(key == run_id, *which))

    return write


def an_event(**fields: Any) -> Break:
    def write(connection: sa.Connection, run_id: str) -> None:
        run = runs.find(connection, run_id)
        assert run is not None
        fields.setdefault("fence", 2)
        event = StoredEvent(run_id=run_id, seq=run.events + 1, at_ns=T0, **fields)
        events.add(connection, [event])
        connection.execute(tables.runs.update().where(tables.runs.c.id == run_id).values(events=run.events + 1))

    return write


def gone(connection: sa.Connection, run_id: str) -> None:
    for table in (tables.events, tables.files, tables.facts, tables.orders, tables.crews, tables.attempts, tables.runs):
        without(table)(connection, run_id)


def audited_again(connection: sa.Connection, run_id: str) -> None:
    audit.record(connection, who=WHO, action=Action.RUN_CREATE, subject=run_id, now_ns=T0)


def lent_twice(connection: sa.Connection, run_id: str) -> None:
    connection.execute(tables.facts.delete().where(tables.facts.c.fence == 2))
    facts.add(connection, (run_id, 2, 0), ledger(run_id, 2, *WHOLE, at_s=11))


class Break(Protocol):
    """Writes something that is never true of a run."""

    def __call__(self, connection: sa.Connection, run_id: str) -> None: ...


BROKEN: dict[str, tuple[str, Break]] = {
    "an acknowledged run is gone": ("I1", gone),
    "its end is another one": ("I2", set_in(tables.runs, state="FAILED", reason="rank_raised")),
    "it goes on after its end": ("I2", an_event(state=State.RUNNING)),
    "it ends twice": ("I2", an_event(state=State.SUCCEEDED, reason=Reason.COMPLETED)),
    "it has ended, and no reason": ("I2", set_in(tables.runs, reason=None)),
    "an attempt is open beside its end": ("I3", set_in(tables.attempts, state="RUNNING", ended_ns=None, reason=None)),
    "an order is missing": ("I3", without(tables.orders, tables.orders.c.fence == 1)),
    "an order is for another node": ("I3", set_in(tables.orders, node_id="node-2")),
    "more retries than it has": ("I3", set_in(tables.runs, retries_used=2)),
    "user code ran again unasked": ("I3", set_in(tables.runs, retries_used=0)),
    "a device of two attempts": ("I4", lent_twice),
    "an event is missing": ("I5", without(tables.events, tables.events.c.seq == 3)),
    "it began a third time": ("I5", an_event(state=State.STARTING, fence=3)),
    "a result is missing": ("I6", without(tables.files, tables.files.c.name == "results/1.pkl")),
    "a result is cut": ("I6", set_in(tables.files, inline=b"o")),
    "the receipt charges more": ("I7", set_in(tables.crews, receipt_json='{"gpu_ms": 2001, "facts": 4}')),
    "a fact is missing": ("I7", without(tables.facts, tables.facts.c.seq == 2)),
    "the ledger says it twice": ("I7", doubled),
    "a day is not in the ledger": ("I7", without(tables.charges, tables.charges.c.fence == 2)),
    "the ledger says more": ("I7", set_in(tables.charges, gpu_ms=2001)),
    "an entry was changed": ("I7", set_in(tables.charges, micros=1)),
    "entries are numbered with a gap": ("I7", set_in(tables.charges, number=2)),
    "all is known, and it is provisional": ("I7", set_in(tables.charges, provisional=True)),
    "what was not there is taken back": ("I7", set_in(tables.charges, kind="reversal")),
    "nobody asked for it": ("I8", without(tables.audit)),
    "it was asked for twice": ("I8", audited_again),
    "a stop of nobody": ("I8", set_in(tables.runs, stop="cancel")),
    "the audit says it was removed": ("I8", set_in(tables.audit, action="run.expire")),
    "a secret in the audit": ("I8", set_in(tables.audit, detail_json='{"value": "hunter2"}')),
}


@pytest.mark.any_database
def test_what_is_wrong_is_found(people: Database) -> None:
    add_node(people, "node-2", name="n2")
    not_found = []
    for what, (invariant, write) in BROKEN.items():
        run_id, other = finished(people), finished(people)
        end = {run_id: (State.SUCCEEDED, Reason.COMPLETED)}
        history = History(acknowledged=frozenset({run_id}), ends=end, secrets=("hunter2",))
        of_one = partial(invariant_inputs.of_runs, run_ids=[run_id])
        assert violations(people.read(of_one), history) == []
        people.write(partial(write, run_id=run_id))
        if invariant not in {one.invariant for one in violations(people.read(of_one), history)}:
            not_found.append(what)
        both = violations(people.read(partial(invariant_inputs.of_runs, run_ids=[other, run_id])))
        assert "I4" in {one.invariant for one in both} or what == golden("server.invariants.acknowledged-run-gone")
    assert not_found == []


def test_what_was_removed_in_order_is_not_missed(people: Database) -> None:
    run_id = finished(people)

    def expire(connection: sa.Connection) -> None:
        gone(connection, run_id)
        audit.record(connection, who=audit.SERVER, action=Action.RUN_EXPIRE, subject=run_id, now_ns=T0)

    people.write(expire)
    assert found(people, History(acknowledged=frozenset({run_id}))) == set()


def test_a_request_that_was_answered_twice_over_is_found(people: Database) -> None:
    run_id = submitted(people)
    assert found(people, History(changed={(Action.RUN_CREATE, run_id): 1})) == set()
    assert ("I8", golden("server.invariants.requests-answered-run")) in found(
        people, History(changed={(Action.RUN_CREATE, run_id): 2})
    )


def stretch(fence: int, began: int, ended: int | None, *, run: str = "r", device: str = "n1/0") -> Stretch:
    devices = (device,)
    return Stretch(run_id=run, fence=fence, node="n1", devices=devices, began_ns=began, ended_ns=ended, freed_ns=ended)


def of_stretches(*stretches: Stretch) -> set[str]:
    return {one.invariant for one in violations(RecordedRuns(), History(stretches=stretches))}


def test_what_the_cluster_did_is_compared_by_one_clock() -> None:
    assert of_stretches(stretch(1, 0, 5), stretch(2, 5, None)) == set()
    assert of_stretches(stretch(1, 0, 6), stretch(2, 5, None, device="n2/0")) == {"I3"}
    assert of_stretches(stretch(1, 0, None), stretch(2, 5, None, device="n2/0")) == {"I3"}
    assert of_stretches(stretch(1, 0, 5), stretch(1, 7, 8)) == {"I3"}
    assert of_stretches(stretch(1, 0, 5), stretch(1, 4, 8, run="s")) == {"I4"}


def test_what_a_server_thinks_is_asked_for_too() -> None:
    moment = LiveState(
        unplaced_s={"a": 61, "b": 59},
        untold_s={"c": 61},
        unstopped_s={"d": 31, "e": 29},
        sizes={"keys": (3, 2), "leases": (2, 2)},
    )
    assert [(one.invariant, one.subject) for one in violations(RecordedRuns(), None, moment)] == [
        ("I11", "run a"),
        ("I12", "run d"),
        ("I14", "run c"),
        ("I15", "keys"),
    ]


def test_a_part_that_is_not_in_the_store_is_found(people: Database) -> None:
    run_id = finished(people)
    part = "0" * 64
    in_store = StoredFile(name="results/1.pkl", size=9, parts=(part,))
    people.write(lambda connection: files.put(connection, run_id, 2, [in_store]))
    page = people.read(lambda connection: invariant_inputs.load(connection))
    assert violations(page) == []
    assert [str(one) for one in violations(page, None, LiveState(missing_parts=frozenset({part})))] == [
        golden("server.invariants.i6-run-parts", run_id=run_id)
    ]


def test_what_is_too_much_is_left_out_and_said(people: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant_inputs, "FACTS_MAX", 5)
    monkeypatch.setattr(invariant_inputs, "EVENTS_MAX", 2)
    run_id = finished(people)
    checked = check(people.read)
    assert checked.skipped == (
        golden("server.invariants.events-run", run_id=run_id),
        golden("server.invariants.facts-attempt", run_id=run_id),
    )
    assert checked.violations == ()


HAPPENED: tuple[Event, ...] = (
    RunPlaced(),
    UserCodeStarted(),
    Stopping(),
    Silent(),
    *(Heard(state) for state in (State.STARTING, State.RUNNING, State.STOPPING)),
    *(StopAsked(why) for why in StopReason),
    *(AttemptEnded(reason, began=began) for reason in Reason for began in (False, True)),
    GivenUp(Reason.NODE_GONE),
    GivenUp(Reason.NODE_REBOOTED),
    Forgotten(),
    Restored(),
    Unsatisfiable(),
)


def test_both_tables_of_states_lead_to_the_same() -> None:
    """What `run_lifecycle.py` can make of a run, whatever happens to it, is what is allowed here, and nothing else."""
    reached: dict[State, set[State]] = {state: set() for state in State}
    heard = (State.STARTING, State.RUNNING, State.STOPPING)
    variants = itertools.product(MOVES, (None, *StopReason), (False, True), (False, True), (0, 1), heard)
    for state, stop, began, may_resume, left, before in variants:
        for event in HAPPENED:
            life = run_lifecycle.Run(
                run_id="r",
                fence=1,
                state=state,
                stop=stop,
                began=began,
                may_resume=may_resume,
                retries_left=left,
                infra_left=left,
                before=before if state is State.UNREACHABLE else None,
            )
            with contextlib.suppress(run_lifecycle.IllegalRunTransition):
                after, issued = run_lifecycle.advance(life, event)
                if after.state is not state or issued:
                    reached[state].add(after.state)
    allowed = {state: set(following) for state, following in MOVES.items()}
    assert reached == allowed


def test_a_stop_is_of_somebody(people: Database) -> None:
    run_id = submitted(people)
    place(people, run_id)
    tell(people, run_id, StopAsked(StopReason.CANCEL))
    assert ("I8", golden("server.invariants.asked-stop-cancel")) in found(people)
