"""A gang on two nodes, as its crews report it: each tells its own story, and the run is what they amount to."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, Forgotten, GivenUp, Silent, StopAsked
from serverless_gpu.server.billing import run_costs
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import parse_attempt_token
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import invariant_inputs, run_invariants
from serverless_gpu.server.lifecycle import metering, transitions
from serverless_gpu.server.lifecycle.transitions import Note
from serverless_gpu.server.nodes import capacity
from serverless_gpu.server.records import active_runs, attempts, charges, run_list, runs
from serverless_gpu.server.records.run_list import RunFilter
from serverless_gpu.server.runs import run_views
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, LogPiece
from tests.support.golden import golden
from tests.support.server.charged import charge_all
from tests.support.server.ganged import (
    FINISHED,
    RAISED,
    began,
    happened,
    place_met,
    result,
    say,
    services_of_nodes,
    told_of,
    waiting,
    wrong,
)
from tests.support.server.stored import T0, S, add_run, outcome, place_gang, rows, stored, tell


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0 + 9 * S)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    return services_of_nodes(database, tmp_path, clock, nodes=2)


@pytest.fixture
def run_id(services: Services, database: Database) -> str:
    """Return a run of three ranks, two on n1 and one on n2."""
    run_id = add_run(database)
    place_met(database, run_id, 2, 1)
    return run_id


def test_a_gang_is_placed_with_a_crew_and_an_order_for_each_node(database: Database, run_id: str) -> None:
    run = stored(database, run_id)
    assert run.attempt is not None and (run.attempt.world_size, run.attempt.num_nodes) == (3, 2)
    assert [(crew.number, crew.node, crew.first_rank, crew.gpus) for crew in run.attempt.crews] == [
        (0, "n1", 0, 2),
        (1, "n2", 2, 1),
    ]
    assert run.attempt.node == "n1, n2" and run_views.attempt_view(run.attempt).node == "n1, n2"
    assert told_of(database, run_id) == [(State.STARTING, golden("server.crews.placed-n1-n2"))]
    for number, node_id in enumerate(("node-1", "node-2")):
        (order,) = waiting(database, node_id)
        assert (order.run_id, order.fence, order.crew, order.kind) == (run_id, 1, number, "start")
    for found in (
        database.read(runs.active),
        database.read(lambda connection: runs.find_many(connection, [run_id])),
        database.read(lambda connection: runs.on_node(connection, "node-2")),
        database.read(lambda connection: run_list.page(connection, RunFilter(), limit=1)).runs,
    ):
        assert found == [run]
    assert database.read(lambda connection: attempts.of_run(connection, run_id)) == [run.attempt]
    (active,) = database.read(active_runs.active_briefly)
    assert [(crew.id, crew.node_id, crew.gpus) for crew in active.crews] == [
        ((run_id, 1, 0), "node-1", 2),
        ((run_id, 1, 1), "node-2", 1),
    ]
    assert wrong(database) == []


def test_no_node_has_two_crews_of_one_gang(database: Database, services: Services) -> None:
    run_id = add_run(database)
    place_gang(database, run_id, 1)
    again = {**rows(database, tables.crews)[0], "crew": 1, "token_sha256": "another"}
    with pytest.raises(sa.exc.IntegrityError):
        database.write(lambda connection: connection.execute(tables.crews.insert(), again))


def test_it_runs_when_all_of_it_runs_and_has_begun_with_the_first(
    services: Services, database: Database, run_id: str
) -> None:
    say(services, run_id, 1, exec_ns=T0 + 3 * S)
    run = stored(database, run_id)
    assert run.attempt is not None
    assert (run.state, run.attempt.state, run.attempt.began, run.life.began) == (
        State.STARTING,
        State.STARTING,
        True,
        True,
    )
    assert (run.attempt.started_ns, [crew.state for crew in run.attempt.crews]) == (
        T0 + 3 * S,
        [State.STARTING, State.RUNNING],
    )
    say(services, run_id, 0, exec_ns=T0 + 4 * S)
    run = stored(database, run_id)
    assert (run.state, run.started_ns) == (State.RUNNING, T0 + 3 * S)
    assert [state for state, _ in told_of(database, run_id)] == [State.STARTING, State.RUNNING]
    assert wrong(database) == []


def test_it_ends_when_both_have_and_is_settled_with_the_last_receipt(
    services: Services, database: Database, run_id: str
) -> None:
    began(services, run_id)
    say(services, run_id, 1, State.STOPPING, files=(result(2),), ending=FINISHED, receipt=msgspec.Raw(b"{}"))
    run = stored(database, run_id)
    assert run.attempt is not None
    assert (run.state, [crew.ended_ns is None for crew in run.attempt.crews]) == (State.RUNNING, [True, False])
    assert not run.finished and run.settled_ns is None and run.attempt.settled_ns is None
    assert wrong(database) == []
    files = (result(0), result(1))
    say(services, run_id, 0, State.STOPPING, files=files, ending=FINISHED)
    run = stored(database, run_id)
    assert (run.state, run.reason, run.finished) == (State.SUCCEEDED, Reason.COMPLETED, False)
    say(services, run_id, 0, State.STOPPING, receipt=msgspec.Raw(b"{}"))
    assert stored(database, run_id).finished
    assert wrong(database) == []


def test_a_crew_sends_its_own_ranks_and_no_others(services: Services, database: Database, run_id: str) -> None:
    began(services, run_id)
    say(services, run_id, 1, logs=(LogPiece(rank=2, stream="stdout", offset=0, data=b"x"),))
    say(services, run_id, 1, logs=(LogPiece(rank=1, stream="telemetry", offset=0, data=b"x"),))
    for rank, name in ((0, "stdout"), (1, "stderr"), (3, "stdout"), (0, "telemetry")):
        with pytest.raises(InvalidValue, match=f"no rank {rank}"):
            say(services, run_id, 1, logs=(LogPiece(rank=rank, stream=name, offset=0, data=b"x"),))  # type: ignore[arg-type]  # as from a node
    with pytest.raises(InvalidValue, match=re.escape(golden("server.crews.node-n2"))):
        say(services, run_id, 1, State.STOPPING, files=(result(0),), ending=FINISHED)
    say(services, run_id, 0, files=(result(0),))
    with pytest.raises(InvalidValue, match="0 of 1 results"):
        say(services, run_id, 1, State.STOPPING, ending=FINISHED)


def test_one_crew_is_silent_and_the_other_reports(services: Services, database: Database, run_id: str) -> None:
    began(services, run_id)
    happened(database, run_id, 1, Silent())
    run = stored(database, run_id)
    assert run.state is State.UNREACHABLE and golden("server.crews.word-n2-since") in run_views.sentence(run)
    say(services, run_id, 0, sentence="epoch 3")
    say(services, run_id, 0, State.STOPPING)
    assert stored(database, run_id).state is State.UNREACHABLE
    say(services, run_id, 1)
    assert stored(database, run_id).state is State.STOPPING
    assert told_of(database, run_id)[2:] == [
        (State.UNREACHABLE, golden("server.crews.word-n2-run")),
        (State.STOPPING, "n2 answers again"),
    ]
    assert wrong(database) == []


def test_both_are_silent_and_one_answers(services: Services, database: Database, run_id: str) -> None:
    began(services, run_id)
    happened(database, run_id, 0, Silent())
    happened(database, run_id, 1, Silent())
    say(services, run_id, 0)
    run = stored(database, run_id)
    assert run.state is State.UNREACHABLE and golden("server.crews.word-n2-since") in run_views.sentence(run)
    say(services, run_id, 1)
    assert stored(database, run_id).state is State.RUNNING


def test_a_gang_with_a_lost_crew_ends_with_the_other_and_settles(
    services: Services, database: Database, run_id: str
) -> None:
    began(services, run_id)
    happened(database, run_id, 1, Silent())
    happened(database, run_id, 1, GivenUp(Reason.NODE_GONE), detail="the node was silent for 960 s")
    assert told_of(database, run_id)[-1] == (State.STOPPING, golden("server.crews.n2-nothing-heard"))
    assert services.looks.of("node-1") == ()  # whoever tells it announces it
    run = stored(database, run_id)
    assert run.attempt is not None and run.attempt.cause is not None
    assert (run.state, run.attempt.cause.crew, run.attempt.cause.reason) == (State.STOPPING, 1, Reason.NODE_GONE)
    assert say(services, run_id, 1).stale and not say(services, run_id, 0).stale
    ending = Ending(state=State.FAILED, reason=Reason.PEER_FAILED, began=True, stopped=msgspec.Raw(b"{}"))
    say(services, run_id, 0, State.STOPPING, ending=ending, receipt=msgspec.Raw(b"{}"))
    run = stored(database, run_id)
    assert (run.state, run.reason, run.finished) == (State.LOST, Reason.NODE_GONE, True)
    found = database.read(lambda connection: attempts.failed_nodes(connection, [run_id]))
    assert found == {run_id: frozenset({"node-2"})}
    assert wrong(database) == []


def test_user_code_that_began_is_not_forgotten_when_another_crew_is_given_up(
    services: Services, database: Database, run_id: str
) -> None:
    happened(database, run_id, 1, GivenUp(Reason.NODE_GONE))
    ending = Ending(state=State.FAILED, reason=Reason.PEER_FAILED, began=True, stopped=msgspec.Raw(b"{}"))
    say(services, run_id, 0, State.STOPPING, ending=ending)
    run = stored(database, run_id)
    assert (run.state, run.reason, run.infra_retries_used) == (State.LOST, Reason.NODE_GONE, 0)
    assert run.attempt is not None and run.attempt.began


def test_who_fails_is_the_story_and_not_who_was_told_of_it(services: Services, database: Database, run_id: str) -> None:
    began(services, run_id)
    say(services, run_id, 1, State.STOPPING, ending=RAISED)
    ending = Ending(state=State.FAILED, reason=Reason.PEER_FAILED, began=True, stopped=msgspec.Raw(b"{}"))
    say(services, run_id, 0, State.STOPPING, ending=ending)
    run = stored(database, run_id)
    assert (run.state, run.reason) == (State.FAILED, Reason.RANK_RAISED)
    told = outcome(database, run_id).stopped  # nobody said a word that can be read: the crew's halt speaks for it
    assert told is not None and json.loads(told)["cause"]["node"] == "n2"


def write_at_once(database: Database, write: Callable[[sa.Connection, int], object]) -> None:
    """Call `write` for both crews in two threads; on PostgreSQL both transactions have begun before either writes."""
    begun = threading.Barrier(2)

    def attempt(number: int) -> None:
        tries: list[int] = []

        def work(connection: sa.Connection) -> None:
            connection.execute(sa.select(tables.runs.c.id)).all()
            if not tries and database.kind == "postgresql":
                begun.wait(30)
            tries.append(number)
            write(connection, number)

        database.write(work)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def end_crew(connection: sa.Connection, number: int, *, run_id: str) -> None:
    """Write that a crew has ended."""
    run = runs.find(connection, run_id)
    assert run is not None
    transitions.apply_to_crew(
        connection, run, number, AttemptEnded(Reason.COMPLETED, began=True), note=Note(at_ns=T0 + 5 * S)
    )


def test_endings_that_cross_conclude_once(services: Services, database: Database, run_id: str) -> None:
    began(services, run_id)
    write_at_once(database, partial(end_crew, run_id=run_id))
    run = stored(database, run_id)
    assert run.attempt is not None and run.attempt.open_crews == ()
    assert (run.state, run.reason) == (State.SUCCEEDED, Reason.COMPLETED)
    assert wrong(database) == [golden("server.crews.succeeded-results")]


def test_the_last_two_crews_that_settle_at_once_settle_the_attempt(
    services: Services, database: Database, run_id: str
) -> None:
    began(services, run_id)
    for number in (0, 1):
        database.write(partial(end_crew, number=number, run_id=run_id))

    def settle(connection: sa.Connection, number: int) -> None:
        transitions.settle(connection, (run_id, 1, number), receipt="{}", at_ns=T0 + 9 * S)

    write_at_once(database, settle)
    attempt = stored(database, run_id).attempt
    assert attempt is not None and attempt.settled_ns == T0 + 9 * S


def test_a_stop_reaches_every_crew_and_no_start_leaves_for_one_that_is_over(
    services: Services, database: Database, run_id: str
) -> None:
    began(services, run_id)
    happened(database, run_id, 1, GivenUp(Reason.NODE_REBOOTED))
    assert waiting(database, "node-2") == []
    assert [one.kind for one in waiting(database, "node-1")] == ["start"]
    tell(database, run_id, StopAsked(StopReason.CANCEL))
    assert [one.kind for one in waiting(database, "node-1")] == [
        "start",
        "stop",
    ]
    other = add_run(database)
    place_gang(database, other, 2, 1)
    tell(database, other, StopAsked(StopReason.CANCEL))
    for node_id in ("node-1", "node-2"):
        found = waiting(database, node_id)
        assert [one.kind for one in found if one.run_id == other] == ["start", "stop"]


def test_freed_is_of_one_crew(services: Services, database: Database, run_id: str) -> None:
    began(services, run_id)
    say(services, run_id, 1, State.STOPPING, freed=True)
    active = tuple(database.read(active_runs.active_briefly))
    there = capacity.CapacitySnapshot(nodes=(), pools=(), active=active, freed=services.leases.freed())
    assert {node: [one.gpus for one in held] for node, held in there.by_node().items()} == {"node-1": [2]}
    assert services.leases.freed() == {(run_id, 1, 1)}


def test_a_renewed_token_is_of_the_same_crew(services: Services, database: Database, run_id: str) -> None:
    gang = (f"{run_id}:1",)
    for number, node_id in enumerate(("node-1", "node-2")):
        wanted = partial(services.attempt_tokens.wanted, node_id=node_id, gangs=gang)
        found = database.read(wanted)
        assert [parse_attempt_token(token) for token in found.values()] == [(run_id, 1, number)]
        who = Caller(kind="attempt", attempt=(run_id, 1, number), until_ns=T0 + 2 * S)
        assert parse_attempt_token(services.attempt_tokens.next(who)) == (run_id, 1, number)


def test_one_node_is_forgotten_and_then_the_other(services: Services, database: Database, run_id: str) -> None:
    began(services, run_id)
    happened(database, run_id, 1, Forgotten())
    run = stored(database, run_id)
    assert run.state is State.STOPPING and run.attempt is not None and len(run.attempt.open_crews) == 1
    happened(database, run_id, 0, Forgotten())
    run = stored(database, run_id)
    assert (run.state, run.reason, run.finished) == (State.LOST, Reason.NODE_GONE, True)


# --- what it costs ----------------------------------------------------------------------------------------------------


def used(run_id: str, gpus: int, *, seconds: int, boot: str = "boot-1") -> list[Fact]:
    """Return the facts of a crew that used devices for some time; both crews number theirs from 0."""
    kinds = (FactKind.RESERVED, FactKind.EXEC, FactKind.FREED)
    return [
        Fact(
            attempt=f"{run_id}:1",
            seq=seq,
            kind=kind,
            boot_id=boot,
            boottime_ns=(1_000 + (seconds if kind is FactKind.FREED else 0)) * S,
            wall_ns=T0 + 2 * S + (seconds * S if kind is FactKind.FREED else 0),
            gpus=tuple(f"GPU-{boot}-{index}" for index in range(gpus)),
            cpus=0,
            memory_bytes=0,
        )
        for seq, kind in enumerate(kinds)
    ]


def at_a_price(database: Database, run_id: str) -> None:
    text = msgspec.json.encode(Tariff(gpu_micros_per_hour=3_600_000)).decode()
    database.write(lambda connection: attempts.note(connection, run_id, 1, tariff_json=text))


def test_each_crew_is_charged_for_what_it_had(services: Services, database: Database, run_id: str) -> None:
    at_a_price(database, run_id)
    began(services, run_id)
    facts_of = [used(run_id, 2, seconds=60), used(run_id, 1, seconds=30, boot="boot-2")]
    say(services, run_id, 1, State.STOPPING, facts=tuple(facts_of[1]), files=(result(2),), ending=FINISHED)
    say(services, run_id, 1, State.STOPPING, receipt=msgspec.Raw(b'{"gpu_ms": 30000, "facts": 3}'))
    assert database.read(lambda connection: charges.due_crews(connection, limit=9)) == []  # who pays is not known yet
    charge_all(services)
    files = (result(0), result(1))
    say(services, run_id, 0, State.STOPPING, facts=tuple(facts_of[0]), files=files, ending=FINISHED)
    run = stored(database, run_id)
    before = database.read(
        lambda connection: run_costs.cost_of(connection, run, metering.now(services.clock, services.leases))
    )
    assert (before.gpu_ms, before.is_final) == (150_000, False)
    say(services, run_id, 0, State.STOPPING, receipt=msgspec.Raw(b'{"gpu_ms": 120000, "facts": 3}'))
    charge_all(services)
    posted = database.read(lambda connection: charges.of_run(connection, run_id))
    assert {key: [one.entry.line.micros for one in own] for key, own in posted.items()} == {
        (1, 0): [120_000],
        (1, 1): [30_000],
    }
    assert [one.queued_ms for own in posted.values() for one in own] == [1_000, 0]
    run = stored(database, run_id)
    cost = database.read(
        lambda connection: run_costs.cost_of(connection, run, metering.now(services.clock, services.leases))
    )
    assert (cost.gpu_ms, cost.micros, cost.is_final, cost.attempts) == (150_000, 150_000, True, 1)
    assert wrong(database) == []
    assert list(run_invariants.Lendings().look(database.read(invariant_inputs.load))) == []


def test_nobody_pays_for_peers_of_a_lost_node(services: Services, database: Database, run_id: str) -> None:
    at_a_price(database, run_id)
    began(services, run_id)
    happened(database, run_id, 1, GivenUp(Reason.NODE_GONE))
    ending = Ending(state=State.FAILED, reason=Reason.PEER_FAILED, began=True, stopped=msgspec.Raw(b"{}"))
    own = tuple(used(run_id, 2, seconds=60))
    say(services, run_id, 0, State.STOPPING, facts=own, ending=ending, receipt=msgspec.Raw(b"{}"))
    charge_all(services)
    posted = database.read(lambda connection: charges.of_run(connection, run_id))
    (entry,) = [one.entry for one in posted.pop((1, 0))]
    assert (entry.line.gpu_ms, entry.line.billed_ms, posted) == (120_000, 0, {})
    assert wrong(database) == []
