"""Asking a run to stop: who may, what is written, and what happens when the end comes first."""

from __future__ import annotations

import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serverless_gpu.errors import AlreadyFinished, InvalidValue, NotAllowed, NotFound
from serverless_gpu.model.lifecycle.attempt import MEANINGS, STOPPED_BY, TERMINAL, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import (
    AttemptEnded,
    Event,
    Run,
    RunInstruction,
    StopAsked,
    Stopping,
    UserCodeStarted,
    advance,
)
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit, events
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.server.made import made_services
from tests.support.server.stored import add_node, add_people, add_run, place, stored, tell

ALICE = Caller(name="alice", role="member")
BOB = Caller(name="bob", role="member", teams=("search",))
VIEWER = Caller(name="vera", role="viewer")
OPERATOR = Caller(name="olga", role="operator")


@pytest.fixture
def services(database: Database, tmp_path: Path) -> Services:
    add_people(database, "alice", "bob", "vera", "olga")
    add_node(database)
    return made_services(database, tmp_path, clock=FakeClock())


def test_a_running_run_is_asked_and_it_is_written_who_asked(services: Services, database: Database) -> None:
    run_id = add_run(database)
    place(database, run_id)
    view = services.stops.request(ALICE, "own", run_id=run_id, why=StopReason.CANCEL)
    assert (view.state, view.stop, view.sentence) == (
        State.STOPPING,
        StopReason.CANCEL,
        golden("server.stopping.asked-stop-cancel"),
    )
    (entry,) = database.read(audit.entries)
    assert (entry.action, entry.principal, entry.subject) == ("run.stop", "alice", run_id)
    assert entry.detail == {"reason": "cancel", "fence": 1}


def test_asking_again_for_the_same_changes_nothing(services: Services, database: Database) -> None:
    run_id = add_run(database)
    for _ in range(2):
        view = services.stops.request(ALICE, "own", run_id=run_id, why=StopReason.CANCEL)
        assert (view.state, view.finished) == (State.CANCELLED, True)
    assert len(database.read(audit.entries)) == 1


def test_who_asks_after_the_end_is_told_so(services: Services, database: Database) -> None:
    run_id = add_run(database)
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.COMPLETED, began=True))
    with pytest.raises(AlreadyFinished, match="SUCCEEDED"):
        services.stops.request(ALICE, "own", run_id=run_id, why=StopReason.CANCEL)
    assert stored(database, run_id).state is State.SUCCEEDED
    assert database.read(audit.entries) == []


def test_runs_of_others_are_stopped_by_operators_only(services: Services, database: Database) -> None:
    mine, ours = add_run(database), add_run(database, team="search")
    for run_id, who in [(mine, BOB), (mine, VIEWER), (ours, VIEWER)]:
        with pytest.raises(NotFound):
            services.stops.request(who, "own", run_id=run_id, why=StopReason.CANCEL)
    with pytest.raises(NotAllowed, match=re.escape(golden("server.stopping.bob-may-see"))):
        services.stops.request(BOB, "own", run_id=ours, why=StopReason.CANCEL)
    with pytest.raises(NotFound):
        services.stops.request(ALICE, "own", run_id="nobody", why=StopReason.CANCEL)
    assert stored(database, mine).state is stored(database, ours).state is State.QUEUED
    assert services.stops.request(OPERATOR, "all", run_id=mine, why=StopReason.CANCEL).state is State.CANCELLED


@pytest.mark.parametrize("why", [StopReason.TIMEOUT, StopReason.BUDGET])
def test_nobody_claims_a_limit(services: Services, database: Database, why: StopReason) -> None:
    with pytest.raises(InvalidValue, match="clients cannot use the stop reason"):
        services.stops.request(ALICE, "own", run_id=add_run(database), why=why)


def test_a_run_that_waits_has_no_room_to_make(services: Services, database: Database) -> None:
    run_id = add_run(database)
    assert services.stops.request(ALICE, "own", run_id=run_id, why=StopReason.PREEMPT).state is State.QUEUED
    assert database.read(audit.entries) == []


def test_F63_cancel_and_completion_in_every_order_have_one_winner() -> None:
    """A thousand seeded orders of what the node reports, what people ask, and repetitions of both."""
    ends = [AttemptEnded(Reason.COMPLETED, began=True), AttemptEnded(Reason.RANK_RAISED, began=True)]
    for seed in range(1_000):
        chance = random.Random(seed)
        node: list[Event] = [UserCodeStarted(), Stopping(), chance.choice(ends)]
        people: list[Event] = [StopAsked(StopReason.CANCEL)] * chance.randint(1, 3)
        run = Run(run_id="r", fence=1, state=State.STARTING, retries_left=chance.randint(0, 1))
        ending: Run | None = None
        while node or people:
            queue = chance.choice([one for one in (node, people) if one])
            event = queue.pop(0)
            if run.state in TERMINAL or (run.state is State.QUEUED and queue is node):
                assert ending == run  # one winner; whoever comes later is told
                continue
            if isinstance(event, AttemptEnded) and run.stop is not None and chance.random() < 0.5:
                event = AttemptEnded(STOPPED_BY[run.stop], began=True)  # the stop arrived in time
            run, instructions = advance(run, event)
            if run.state is State.QUEUED:
                assert RunInstruction.REQUEUE in instructions
                run = then_cancelled(run)
            if run.state in TERMINAL:
                ending = run
        assert run.state in {State.SUCCEEDED, State.FAILED, State.CANCELLED}, seed


def then_cancelled(run: Run) -> Run:
    """Return a run that waits again as it is after somebody cancelled it: nothing else can come of it here."""
    return advance(run, StopAsked(StopReason.CANCEL))[0]


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(20))
def test_F63_cancel_and_completion_at_once_have_one_winner(services: Services, database: Database, seed: int) -> None:
    run_id = add_run(database)
    place(database, run_id)
    tell(database, run_id, UserCodeStarted())
    together = threading.Barrier(3)

    def cancel(_: int) -> str:
        together.wait(30)
        try:
            return services.stops.request(ALICE, "own", run_id=run_id, why=StopReason.CANCEL).state
        except AlreadyFinished as error:
            return error.code

    def complete() -> None:
        together.wait(30)
        tell(database, run_id, AttemptEnded(Reason.COMPLETED, began=True))

    with ThreadPoolExecutor(3) as pool:
        completed = pool.submit(complete)
        answers = sorted(pool.map(cancel, range(2)))
        completed.result()
    run = stored(database, run_id)
    assert run.state is State.SUCCEEDED  # every rank had returned, whoever was first
    told = database.read(lambda connection: events.after(connection, run_id, 0))
    assert [event.seq for event in told] == list(range(2, 2 + len(told)))  # add_run writes none
    assert [event.state for event in told if event.state in TERMINAL] == [State.SUCCEEDED]
    # Who was first was told that it stops, or, asking a moment later, how it ended; who was late that there is nothing.
    assert set(answers) <= {"STOPPING", "SUCCEEDED", "already_finished"}
    assert (run.stop is None) == (answers == ["already_finished"] * 2)
    assert MEANINGS[Reason.COMPLETED].state is run.state
