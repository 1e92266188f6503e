"""What happens to a run becomes rows: the run, its attempt, its events, orders; all of it, or nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import StaleAttempt
from serverless_gpu.model.lifecycle.attempt import TERMINAL, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import (
    AttemptEnded,
    Event,
    Forgotten,
    GivenUp,
    Heard,
    IllegalRunTransition,
    RunInstruction,
    Silent,
    StopAsked,
    Stopping,
    UserCodeStarted,
)
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.hub import SCHEDULER, node_key, run_key
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Note
from serverless_gpu.server.records import attempts, crews, events, orders, run_list, runs
from tests.support.golden import golden
from tests.support.server.stored import T0, S, add_node, add_people, add_run, outcome, place, rows, stored, tell


@pytest.fixture
def run_id(database: Database) -> str:
    """Return a run of alice's that waits, beside a node."""
    add_people(database, "alice")
    add_node(database)
    return add_run(database)


def told_of(database: Database, run_id: str) -> list[tuple[int, int, State, Reason | None, str]]:
    found = database.read(lambda connection: events.after(connection, run_id, 0))
    return [(event.seq, event.fence, event.state, event.reason, event.sentence) for event in found]


def test_a_placement_is_an_attempt_an_event_and_an_order_in_one(database: Database, run_id: str) -> None:
    assert place(database, run_id) == 1
    run = stored(database, run_id)
    assert (run.state, run.fence, run.events) == (State.STARTING, 1, 2)
    assert run.attempt is not None
    assert (run.attempt.state, run.attempt.node, run.attempt.gpu_type) == (State.STARTING, "n1", "H100")
    assert (run.attempt.created_ns, run.attempt.crews[0].lease_ns, run.attempt.ended_ns) == (T0 + S, T0 + S, None)
    assert told_of(database, run_id) == [(2, 1, State.STARTING, None, "placed on n1")]
    (order,) = database.read(lambda connection: orders.waiting(connection, "node-1"))
    assert (order.run_id, order.fence, order.kind) == (run_id, 1, "start")


def test_a_run_is_placed_once(database: Database, run_id: str) -> None:
    place(database, run_id)
    with pytest.raises(IllegalRunTransition):
        place(database, run_id)
    assert len(rows(database, tables.attempts)) == 1


def test_a_change_of_a_run_that_changed_meanwhile_changes_nothing(database: Database, run_id: str) -> None:
    place(database, run_id)
    before = stored(database, run_id)
    tell(database, run_id, UserCodeStarted())
    written = {table.name: rows(database, table) for table in tables.metadata.sorted_tables}
    with pytest.raises(StaleAttempt):
        database.write(lambda connection: transitions.apply(connection, before, Stopping(), note=Note(at_ns=T0)))
    assert {table.name: rows(database, table) for table in tables.metadata.sorted_tables} == written


def test_a_run_lives_and_succeeds(database: Database, run_id: str) -> None:
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), exec_ns=T0 + 5 * S)
    told = tell(database, run_id, Stopping(), AttemptEnded(Reason.COMPLETED, began=True), at_ns=T0 + 9 * S)
    assert told.instructions == (RunInstruction.CONCLUDE,)
    run = stored(database, run_id)
    assert (run.state, run.reason, run.started_ns, run.ended_ns) == (
        State.SUCCEEDED,
        Reason.COMPLETED,
        T0 + 5 * S,
        T0 + 9 * S,
    )
    attempt = run.attempt
    assert attempt is not None
    assert (attempt.state, attempt.reason, attempt.began) == (State.SUCCEEDED, Reason.COMPLETED, True)
    assert (attempt.started_ns, attempt.ended_ns, attempt.crews[0].given_up) == (T0 + 5 * S, T0 + 9 * S, False)
    assert told_of(database, run_id)[1:] == [
        (3, 1, State.RUNNING, None, ""),
        (4, 1, State.STOPPING, None, ""),
        (5, 1, State.SUCCEEDED, Reason.COMPLETED, "every rank returned"),
    ]
    assert not run.finished  # its receipt is to come
    assert database.write(
        lambda connection: transitions.settle(connection, (run_id, 1, 0), receipt="{}", at_ns=T0 + 10 * S)
    )
    assert stored(database, run_id).finished
    assert outcome(database, run_id).receipt == "{}"


def test_what_changes_nothing_writes_nothing(database: Database, run_id: str) -> None:
    place(database, run_id)
    tell(database, run_id, UserCodeStarted())
    written = rows(database, tables.runs)
    assert not tell(database, run_id, Heard(State.RUNNING), UserCodeStarted()).changed
    assert rows(database, tables.runs) == written


def test_silence_and_a_word_after_it_are_events(database: Database, run_id: str) -> None:
    place(database, run_id)
    tell(database, run_id, UserCodeStarted())
    tell(database, run_id, Silent())
    run = stored(database, run_id)
    assert run.attempt is not None
    assert (run.state, run.attempt.state, run.attempt.before) == (State.UNREACHABLE, State.UNREACHABLE, State.RUNNING)
    tell(database, run_id, Heard(State.RUNNING))
    run = stored(database, run_id)
    assert run.attempt is not None
    assert (run.state, run.attempt.state, run.attempt.before) == (State.RUNNING, State.RUNNING, None)
    assert told_of(database, run_id)[-2:] == [
        (4, 1, State.UNREACHABLE, None, golden("server.transitions.word-n1-run")),
        (5, 1, State.RUNNING, None, "n1 answers again"),
    ]


def test_a_stop_is_an_order_and_a_stronger_one_another(database: Database, run_id: str) -> None:
    place(database, run_id)
    tell(database, run_id, UserCodeStarted())
    for why in (StopReason.PREEMPT, StopReason.DRAIN, StopReason.CANCEL, StopReason.CANCEL):
        tell(database, run_id, StopAsked(why))
    found = database.read(lambda connection: orders.waiting(connection, "node-1"))
    assert [(order.kind, order.stop) for order in found] == [
        ("start", None),
        ("stop", StopReason.PREEMPT),
        ("stop", StopReason.CANCEL),
    ]
    assert stored(database, run_id).stop is StopReason.CANCEL


def test_a_run_that_is_cancelled_while_it_waits_is_finished(database: Database, run_id: str) -> None:
    tell(database, run_id, StopAsked(StopReason.CANCEL))
    run = stored(database, run_id)
    assert run.finished and run.state is State.CANCELLED and run.stop is StopReason.CANCEL
    assert rows(database, tables.orders) == []
    assert told_of(database, run_id) == [
        (2, 0, State.CANCELLED, Reason.CANCELLED, golden("server.transitions.run-cancelled"))
    ]


def test_F23_faults_of_the_infrastructure_have_a_count_of_their_own(database: Database) -> None:
    add_people(database, "alice")
    add_node(database)
    asked = add_run(database, retry_on_infra=True, retries=1)
    for used, (faults, retries) in enumerate([(1, 0), (2, 0), (3, 0), (3, 1)], start=1):
        place(database, asked)
        tell(database, asked, UserCodeStarted())
        tell(database, asked, AttemptEnded(Reason.GPU_LOST, began=True), detail="GPU-1: Xid 79")
        run = stored(database, asked)
        assert (run.state, run.fence) == (State.QUEUED, used)
        assert (run.fault_retries_used, run.retries_used) == (faults, retries)
    place(database, asked)
    tell(database, asked, UserCodeStarted())
    tell(database, asked, AttemptEnded(Reason.GPU_LOST, began=True), detail="GPU-1: Xid 79")
    assert (stored(database, asked).state, stored(database, asked).reason) == (State.FAILED, Reason.GPU_LOST)


def test_a_new_attempt_begins_anew_and_the_old_one_keeps_its_end(database: Database, run_id: str) -> None:
    place(database, run_id)
    tell(database, run_id, AttemptEnded(Reason.REFUSED, began=False), detail="no disk")
    run = stored(database, run_id)
    assert (run.state, run.fence, run.infra_retries_used, run.queued_ns) == (State.QUEUED, 1, 1, T0)
    assert run.life.infra_left == 2 and run.ended_ns is None and run.settled_ns is None
    assert place(database, run_id, at_ns=T0 + 4 * S) == 2
    found = database.read(lambda connection: attempts.of_run(connection, run_id))
    assert [(one.fence, one.state, one.reason) for one in found] == [
        (1, State.FAILED, Reason.REFUSED),
        (2, State.STARTING, None),
    ]
    sentence = "attempt 1 has ended: the node refused to start the run: no disk; the run waits for another attempt"
    assert (3, 1, State.QUEUED, Reason.REFUSED, sentence) in told_of(database, run_id)
    refused_by = database.read(lambda connection: attempts.failed_nodes(connection, [run_id]))
    assert refused_by == {run_id: frozenset({"node-1"})}


@pytest.mark.parametrize("event", [GivenUp(Reason.NODE_REBOOTED), GivenUp(Reason.NODE_GONE), Forgotten()])
def test_who_is_given_up_needs_no_receipt_and_gets_no_orders(
    database: Database, run_id: str, event: GivenUp | Forgotten
) -> None:
    place(database, run_id)
    tell(database, run_id, event)
    run = stored(database, run_id)
    assert run.finished and run.attempt is not None and run.attempt.crews[0].given_up
    assert database.read(lambda connection: orders.waiting(connection, "node-1")) == []
    assert database.read(lambda connection: crews.open_on(connection, "node-1")) == []


def test_retries_are_counted(database: Database) -> None:
    add_people(database, "alice")
    add_node(database)
    run_id = add_run(database, retries=1)
    for _ in range(2):
        place(database, run_id)
        tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.RANK_RAISED, began=True))
    run = stored(database, run_id)
    assert (run.state, run.fence, run.retries_used) == (State.FAILED, 2, 1)


def test_F73_what_reached_the_longest_time_of_an_attempt_waits_anew_behind_the_others(database: Database) -> None:
    add_people(database, "alice")
    add_node(database)
    run_id = add_run(database, resume=True, policy="llm", max_run_s=7 * 86_400.0)
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.TIMEOUT, began=True), at_ns=T0 + 9 * S)
    run = stored(database, run_id)
    assert (run.state, run.reason, run.queued_ns, run.retries_used) == (State.QUEUED, None, T0 + 9 * S, 0)
    last = rows(database, tables.events)[-1]
    assert last["sentence"] == golden("server.transitions.attempt-over-run")
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), StopAsked(StopReason.CANCEL), AttemptEnded(Reason.TIMEOUT, began=True))
    assert stored(database, run_id).reason is Reason.CANCELLED


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"max_run_s": 60.0}, "the server limits an attempt to 1 min 00 s"),
        ({"max_run_s": 60.0, "timeout_s": 30.0, "resume": True}, ""),  # the user's own limit
        ({"timeout_s": 30.0, "resume": True}, ""),
    ],
)
def test_F73_who_cannot_go_on_has_timed_out_and_is_told_by_whose_limit(
    database: Database, said: dict[str, Any], says: str
) -> None:
    add_people(database, "alice")
    add_node(database)
    run_id = add_run(database, **said)
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.TIMEOUT, began=True))
    run = stored(database, run_id)
    assert (run.state, run.reason, run.detail) == (State.TIMED_OUT, Reason.TIMEOUT, says)


def test_22D2_a_run_whose_attempts_save_nothing_ends_as_that_and_says_how_often(database: Database) -> None:
    add_people(database, "alice")
    add_node(database)
    run_id = add_run(database, resume=True, policy="llm", max_run_s=8.0)
    for number in range(1, 4):
        place(database, run_id)
        tell(database, run_id, UserCodeStarted(), exec_ns=T0 + S)
        tell(database, run_id, AttemptEnded(Reason.TIMEOUT, began=True), at_ns=T0 + 9 * S)
        run = stored(database, run_id)
        assert (run.fence, run.unsaved, run.state in TERMINAL) == (number, number, number == 3)
    assert (run.state, run.reason, run.ran, run.ran_ms) == (State.FAILED, Reason.NO_PROGRESS, 2, 16_000)
    assert run.attempt is not None and run.attempt.reason is Reason.TIMEOUT
    assert rows(database, tables.events)[-1]["sentence"] == golden("server.transitions.attempt-after-attempt")


def test_22D2_a_policy_bounds_the_attempts_of_a_run_and_their_time(database: Database) -> None:
    add_people(database, "alice")
    add_node(database)
    said: dict[str, Any] = {"resume": True, "policy": "llm", "max_run_s": 8.0, "unsaved_max": 99}
    few, short = add_run(database, attempts_max=2, **said), add_run(database, total_run_s=20.0, **said)
    for run_id, attempts_made, says in (
        (few, 2, "usage policy 'llm': at most 2 attempts"),
        (short, 3, "usage policy 'llm' limits all attempts of a run together to 20.0 s"),
    ):
        limits: list[float | None] = []
        while (run := stored(database, run_id)).state not in TERMINAL:
            limits.append(run.spec_now.limit_s)
            place(database, run_id)
            tell(database, run_id, UserCodeStarted(), exec_ns=T0)
            tell(database, run_id, AttemptEnded(Reason.TIMEOUT, began=True), at_ns=T0 + 8 * S)
        assert (run.fence, run.state, run.reason, run.detail) == (attempts_made, State.TIMED_OUT, Reason.TIMEOUT, says)
        assert limits == [8.0, 8.0, 4.0][:attempts_made]


def test_a_receipt_of_an_earlier_attempt_does_not_settle_the_run(database: Database) -> None:
    add_people(database, "alice")
    add_node(database)
    run_id = add_run(database, retries=1)
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.RANK_RAISED, began=True))
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.RANK_RAISED, began=True))

    def settle(fence: int) -> bool:
        return database.write(lambda it: transitions.settle(it, (run_id, fence, 0), receipt="{}", at_ns=T0))

    assert settle(1) and not stored(database, run_id).finished
    assert not settle(1)
    assert settle(2) and stored(database, run_id).finished


def test_those_who_wait_for_a_change_are_woken(services: Services, database: Database, run_id: str) -> None:
    hub = services.hub
    keys = [run_key(run_id), node_key("node-1"), SCHEDULER]

    def touched(*happened: Event) -> list[bool]:
        before = [hub.version(key) for key in keys]
        services.announcer.announce(tell(database, run_id, *happened))
        return [hub.version(key) != version for key, version in zip(keys, before, strict=True)]

    place(database, run_id)
    assert touched(UserCodeStarted()) == [True, False, False]
    assert touched(UserCodeStarted()) == [False, False, False]
    assert touched(StopAsked(StopReason.CANCEL)) == [True, True, False]
    assert touched(AttemptEnded(Reason.CANCELLED, began=True)) == [True, False, True]


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_an_ended_run_cannot_be_changed(database: Database, run_id: str, state: State) -> None:
    database.write(
        lambda connection: connection.execute(sa.update(tables.runs).values(state=state.value, reason="completed"))
    )
    with pytest.raises(IllegalRunTransition):
        tell(database, run_id, StopAsked(StopReason.CANCEL))


def test_each_room_of_runs_finds_what_it_says(database: Database) -> None:
    add_people(database, "alice", "bob")
    add_node(database)
    waiting = add_run(database, at_ns=T0 + 1)
    first = add_run(database, at_ns=T0 + 2, priority="CRITICAL")
    running = add_run(database, owner="bob")
    place(database, running)
    assert database.read(runs.queue) == [(first, 0), (waiting, 0)]
    assert [run.id for run in database.read(runs.active)] == [running]
    found = database.read(lambda connection: runs.find_many(connection, [running, waiting, "nobody"]))
    assert {run.id for run in found} == {running, waiting}
    assert database.read(lambda connection: runs.waiting_of(connection, "alice", at_most=10)) == 2
    assert database.read(lambda connection: runs.waiting_of(connection, "alice", at_most=1)) == 1
    assert database.read(lambda connection: runs.payload(connection, waiting)) == runs.Payload(
        context_sealed=b"sealed", call=b"call"
    )
    assert database.read(lambda connection: runs.find(connection, "nobody")) is None
    assert [one.run_id for one in database.read(lambda it: crews.open_on(it, "node-1"))] == [running]
    assert database.read(lambda it: crews.open_on(it, "node-2")) == []


def test_pages_follow_each_other_without_a_gap_and_show_what_may_be_seen(database: Database) -> None:
    add_people(database, "alice", "bob")
    ids = sorted(
        add_run(database, owner=owner, team="search" if owner == "bob" else None) for owner in ["alice", "bob"] * 5
    )

    def pages(wished: run_list.RunFilter) -> list[str]:
        def page(cursor: str) -> list[str]:
            found = database.read(lambda it: run_list.page(it, wished, limit=3, cursor=cursor))
            assert len(found.runs) <= 3
            return [run.id for run in found.runs] + (page(found.following) if found.following else [])

        return page("")

    assert pages(run_list.RunFilter()) == ids[::-1]
    own = pages(run_list.RunFilter(seen_by="alice"))
    assert len(own) == 5 and own == sorted(own, reverse=True)
    assert pages(run_list.RunFilter(seen_by="alice", teams=("search",))) == ids[::-1]
    assert pages(run_list.RunFilter(team="search")) == pages(run_list.RunFilter(owner="bob"))
    assert pages(run_list.RunFilter(states=(State.RUNNING,))) == []
    assert pages(run_list.RunFilter(name="\0")) == []
    assert len(pages(run_list.RunFilter(states=(State.RUNNING, State.QUEUED)))) == 10


def test_tags_are_compared_exactly(database: Database) -> None:
    add_people(database, "alice")
    odd = {"a%b": "100%_", 'x"k': "v", "ü": "Ä", "Case": "X"}
    run_id = add_run(database, tags=odd)

    def found(**tags: str) -> list[str]:
        page = database.read(lambda it: run_list.page(it, run_list.RunFilter(tags=tags), limit=10)).runs
        return [run.id for run in page]

    for key, value in odd.items():
        assert found(**{key: value}) == [run_id]
    assert found(**odd) == [run_id]
    for key, value in [("k", "v"), ("case", "x"), ("Case", "x"), ("axb", "100%_"), ("a%b", "100x_")]:
        assert found(**{key: value}) == []


def test_a_spec_comes_back_as_it_was_written(database: Database) -> None:
    add_people(database, "alice")
    run_id = add_run(database, name="fit", tags={"a": "b"}, retries=2, timeout_s=1.5)
    run = stored(database, run_id)
    assert (run.name, run.spec.tags, run.spec.retries, run.spec.timeout_s) == ("fit", {"a": "b"}, 2, 1.5)
    assert msgspec.json.decode(rows(database, tables.runs)[0]["tags_json"]) == {"a": "b"}
