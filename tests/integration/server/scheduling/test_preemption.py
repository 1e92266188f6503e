"""Room is made on a whole server: who leaves, for whom, how long that takes, and that nobody leaves for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.engines.simulated_engine import SimulatedWork
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.scheduling.values import QueuePolicy, WaitReason
from serverless_gpu.model.spec import Priority
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants.run_invariants import History
from serverless_gpu.server.invariants.self_check import check
from serverless_gpu.server.records import attempts, audit, events, runs
from serverless_gpu.server.runs import run_views
from serverless_gpu.wire.nodes import PoolRequest
from tests.support.golden import golden
from tests.support.server.simulation import World

pytestmark = pytest.mark.any_database

ROOT = Caller(name="root", role="admin")
SOON = QueuePolicy(preempt_after_s=60.0)


@pytest.fixture
def world(database: Database, tmp_path: Path) -> Iterator[World]:
    """Yield two nodes with four devices each, and a server whose runs may be preempted after a minute."""
    made = World(database, tmp_path, {"n1": "H100:4", "n2": "H100:4"}, queue=SOON)
    made.work = lambda start: SimulatedWork(run_s=400, stop_s=3)
    yield made
    made.assert_sound()
    found = check(database.read, history=History()).violations
    assert [one for one in found if one.invariant != "I8"] == []  # a world's runs are written without a request


def reserve(world: World, *, lends: bool, return_s: float = 60.0) -> None:
    """Have n2 in a reserved pool of its own."""
    assert world.services is not None
    asked = PoolRequest(kind="reserved", nodes=("n2",), lends=lends, return_s=return_s)
    world.services.pools.put(ROOT, "gold", asked)


def sentence(world: World, run_id: str) -> str:
    """Return what a waiting run is told."""
    assert world.services is not None
    return world.services.sentences.of(run_id)


def reasons(world: World, run_id: str) -> list[Reason | None]:
    """Return how the attempts of a run ended."""
    found = world.database.read(lambda connection: attempts.of_run(connection, run_id))
    return [attempt.reason for attempt in found]


def test_a_critical_run_has_one_of_best_effort_leave_which_goes_on_when_there_is_room(world: World) -> None:
    cheap = [world.submit(4, name="cheap", priority=Priority.BEST_EFFORT, resume=True, grace_s=10.0) for _ in range(2)]
    world.run_for(10)
    urgent = world.submit(4, name="llama", priority=Priority.CRITICAL)
    world.run_for(30)
    assert world.run(urgent).state is State.QUEUED  # nobody leaves who has just begun
    assert golden("server.making_room.alice-cheap-holds") in sentence(world, urgent)
    world.run_for(60)
    assert world.run(urgent).state is State.RUNNING
    (left,) = [run_id for run_id in cheap if world.run(run_id).state is not State.RUNNING]
    run = world.run(left)
    assert (run.state, reasons(world, left)) == (State.QUEUED, [Reason.PREEMPTED])
    assert run.queued_ns == run.created_ns
    (attempt,) = world.database.read(lambda connection: attempts.of_run(connection, left))
    assert (
        "alice/llama" in run_views.attempt_view(attempt).sentence
    )  # who it was for is still known when it waits again
    told = world.database.read(lambda connection: events.after(connection, left, 0))
    assert any("attempt 1 has ended" in event.sentence and "alice/llama" in event.sentence for event in told)
    (stop,) = [
        entry
        for entry in world.database.read(audit.entries)
        if entry.action == "run.stop" and entry.principal == "server"
    ]
    assert stop.subject == left and "alice/llama" in str(stop.detail["because"])
    world.run_for(900)
    assert {world.run(run_id).state for run_id in (*cheap, urgent)} == {State.SUCCEEDED}
    assert reasons(world, left) == [Reason.PREEMPTED, Reason.COMPLETED]


def test_what_a_pool_has_lent_is_back_in_time_and_only_those_borrow_who_can_give_it_back(world: World) -> None:
    reserve(world, lends=True, return_s=60.0)
    full = world.submit(4, name="full")
    world.run_for(5)
    stays = world.submit(4, name="stays", priority=Priority.BEST_EFFORT)
    slow = world.submit(4, name="slow", priority=Priority.BEST_EFFORT, resume=True, grace_s=90.0)
    guest = world.submit(4, name="guest", priority=Priority.BEST_EFFORT, resume=True, grace_s=20.0)
    world.run_for(10)
    assert [world.run(run_id).state for run_id in (full, guest)] == [State.RUNNING, State.RUNNING]
    assert [world.run(run_id).state for run_id in (stays, slow)] == [State.QUEUED, State.QUEUED]
    own = world.submit(4, name="own", pool="gold")
    world.run_for(2)
    assert world.services is not None
    wait = world.services.sentences.wait(own)
    assert wait is not None and wait.reason is WaitReason.MAKING_ROOM
    world.run_for(58)
    assert world.run(own).state is State.RUNNING
    assert (world.run(guest).state, reasons(world, guest)) == (State.QUEUED, [Reason.PREEMPTED])
    world.run_for(2_000)
    assert {world.run(run_id).state for run_id in (full, stays, slow, guest, own)} == {State.SUCCEEDED}


def test_a_timeout_that_is_no_longer_than_the_pool_s_time_is_enough_to_borrow(world: World) -> None:
    reserve(world, lends=True, return_s=60.0)
    full = world.submit(4, name="full")
    world.run_for(5)
    world.work = lambda start: SimulatedWork(run_s=40)
    long = world.submit(4, name="long", priority=Priority.BEST_EFFORT, timeout_s=61.0)
    short = world.submit(4, name="short", priority=Priority.BEST_EFFORT, timeout_s=60.0)
    world.run_for(10)
    assert [world.run(run_id).state for run_id in (full, long)] == [State.RUNNING, State.QUEUED]
    assert world.run(short).state is State.RUNNING
    own = world.submit(4, name="own", pool="gold")
    world.run_for(60)
    assert (world.run(short).state, reasons(world, short)) == (State.SUCCEEDED, [Reason.COMPLETED])
    assert world.run(own).state is State.RUNNING


def test_a_server_that_is_started_while_room_is_made_goes_on_with_it(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=400, stop_s=20)
    cheap = [world.submit(4, priority=Priority.BEST_EFFORT, resume=True) for _ in range(2)]
    world.run_for(70)
    urgent = world.submit(4, priority=Priority.CRITICAL)
    world.run_for(3)
    leaving = [run_id for run_id in cheap if world.run(run_id).state is State.STOPPING]
    assert len(leaving) == 1
    world.kill_server()
    world.run_for(5)
    world.start_server()
    world.run_for(30)
    assert world.run(urgent).state is State.RUNNING
    assert [run_id for run_id in cheap if reasons(world, run_id) != [None]] == leaving


@pytest.mark.long
def test_F81_a_large_gang_among_small_ones_starts_by_the_time_that_it_was_told(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=100)
    first = [world.submit(1, timeout_s=120.0, grace_s=5.0) for _ in range(8)]
    world.run_for(20)
    large = world.submit(4, timeout_s=120.0, grace_s=5.0)
    later = [world.submit(1, timeout_s=120.0, grace_s=5.0) for _ in range(30)]
    world.run_for(2)
    assert world.services is not None
    wait = world.services.sentences.wait(large)
    assert wait is not None and wait.at_ns is not None and wait.is_bound
    assert "at the latest" in sentence(world, large)
    while world.clock.wall_ns() < wait.at_ns and world.run(large).state is State.QUEUED:
        world.run_for(5)
    assert world.run(large).state is not State.QUEUED
    world.run_for(900)
    assert {world.run(run_id).state for run_id in (*first, large, *later)} == {State.SUCCEEDED}


def test_F81_a_latest_time_that_was_told_holds_over_a_restart(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=100)
    first = [world.submit(1, timeout_s=120.0, grace_s=5.0) for _ in range(8)]
    world.run_for(20)
    large = world.submit(4, timeout_s=120.0, grace_s=5.0)
    world.run_for(2)
    assert world.services is not None
    told = world.services.sentences.wait(large)
    assert told is not None and told.at_ns is not None and told.is_bound
    world.kill_server()
    world.start_server()
    # These have more right to be next; what the large one was told was told before they came.
    later = [world.submit(4, timeout_s=900.0, grace_s=5.0, team=f"fresh{number}") for number in range(3)]
    world.run_for(15)  # until nodes were heard of
    again = world.services.sentences.wait(large)
    assert again is not None and again.at_ns is not None and again.is_bound
    assert again.at_ns <= told.at_ns
    world.run_for(2_000)
    assert {world.run(run_id).state for run_id in (*first, large, *later)} == {State.SUCCEEDED}
    assert world.services.database.read(runs.promised) == []
