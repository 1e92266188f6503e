"""A server and a cluster on one clock: everything that is lost, killed, cut off or late, and what follows from it.

Each failure row leaves its test; `World.assert_sound` holds in all of them: no attempt ran twice, no two attempts of a
run at once, no device was given twice. That is read from what the cluster did, not from what the server believes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from serverless_gpu import faults
from serverless_gpu.ambient import SystemClock
from serverless_gpu.engines.simulated_engine import SimulatedAgent, SimulatedEngine, SimulatedWork
from serverless_gpu.model.lifecycle.attempt import TERMINAL, Reason, State, StopReason
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import events
from tests.support.golden import golden
from tests.support.server.simulation import Crash, World

pytestmark = pytest.mark.any_database

NODES = {"n1": "H100:8", "n2": "H100:4"}
QUICK = {"partition_grace_s": 60.0, "partition_margin_s": 10.0, "soft_expiry_s": 15.0}
ROOT = Caller(name="root", role="admin")


@pytest.fixture
def world(database: Database, tmp_path: Path) -> Iterator[World]:
    """Yield two nodes and a server with short patience; whatever a test does, the cluster stays sound."""
    world = World(database, tmp_path, NODES, **QUICK)
    yield world
    world.assert_sound()


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let a fault point end the server of the world."""

    def crash(place: str) -> None:
        raise Crash(place)

    monkeypatch.setattr(faults, "crash", crash)
    yield monkeypatch


def outcome(world: World, run_id: str) -> tuple[State, Reason | None]:
    run = world.run(run_id)
    return run.state, run.reason


def test_a_run_goes_through_its_states_and_gives_everything_back(world: World) -> None:
    world.work = lambda start: SimulatedWork(output=b"hello\n", run_s=3)
    run_id = world.submit(2)
    world.run_for(6, step_s=0.05)
    assert outcome(world, run_id) == (State.SUCCEEDED, Reason.COMPLETED)
    assert world.states(run_id) == ["STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    run = world.run(run_id)
    assert run.finished
    assert world.services is not None
    assert bytes(world.services.logs.read(run_id, 1, rank=0, stream="stdout", limit=100)) == b"hello\n"
    assert world.engine.recover() == []
    assert all(agent.gangs == [] for agent in world.agents.values())


def test_large_gangs_are_served_between_small_ones(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=5)
    first = [world.submit(1, timeout_s=60.0) for _ in range(6)]
    world.run_for(2)
    large = world.submit(8)
    later = [world.submit(1, timeout_s=60.0) for _ in range(12)]
    world.run_for(60)
    assert {outcome(world, run_id)[0] for run_id in (*first, large, *later)} == {State.SUCCEEDED}
    order = [one.run_id for one in world.executions()]
    assert order.index(large) < order.index(later[-1])


def test_F14_a_gang_that_does_not_start_is_tried_on_the_other_node_and_ends_after_three_more(world: World) -> None:
    world.work = lambda start: SimulatedWork(start_s=1, reason=Reason.START_FAILED)
    run_id = world.submit(2)
    world.run_for(60)
    assert outcome(world, run_id) == (State.FAILED, Reason.GANG_START)
    run = world.run(run_id)
    assert (run.fence, run.infra_retries_used, world.executions()) == (4, 3, [])
    assert world.services is not None
    told = world.services.database.read(lambda connection: events.after(connection, run_id, 0))
    tried = [event.node for event in told if event.sentence.startswith("placed on")]
    assert set(tried) == {"n1", "n2"}


def test_F17_a_partition_shorter_than_the_grace_ends_nothing(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=120, output=b"x" * 10)
    run_id = world.submit(6)  # on n1
    world.run_for(3)
    node = world.agents["n1"]
    node.reaches = False
    world.run_for(40)
    assert world.run(run_id).state is State.UNREACHABLE
    node.reaches = True
    world.run_for(10)
    assert world.run(run_id).state is State.RUNNING
    world.run_for(90)
    assert outcome(world, run_id) == (State.SUCCEEDED, Reason.COMPLETED)
    assert len(world.executions(run_id)) == 1


@pytest.mark.parametrize("direction", ["reaches", "hears"])
def test_F18_F19_a_partition_longer_than_the_grace_ends_the_attempt_there_before_another_begins(
    world: World, direction: str
) -> None:
    world.work = lambda start: SimulatedWork(run_s=150)
    run_id = world.submit(4, retries=1)
    world.run_for(3)
    (first,) = world.executions(run_id)
    node = world.agents[first.node]
    setattr(node, direction, False)
    world.run_for(100)
    assert first.ended_ns is not None
    world.run_for(240)
    setattr(node, direction, True)
    world.run_for(200)
    assert outcome(world, run_id) == (State.SUCCEEDED, Reason.COMPLETED)
    assert [one.fence for one in world.executions(run_id)] == [1, 2]


def test_F18_without_retries_it_is_lost_and_what_comes_late_is_kept_there(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=None)
    run_id = world.submit(6)
    world.run_for(3)
    node = world.agents["n1"]
    node.reaches = False
    world.run_for(100)
    assert outcome(world, run_id) == (State.LOST, Reason.NODE_GONE)
    node.reaches = True
    world.run_for(10)
    assert node.kept == [(run_id, 1)]
    assert outcome(world, run_id) == (State.LOST, Reason.NODE_GONE)


def test_F21_a_node_that_restarts_is_proof_at_once(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=50)
    run_id, again = world.submit(6), world.submit(4, retries=1)
    world.run_for(3)
    for node in world.agents.values():
        node.reboot()
    world.run_for(3)
    assert outcome(world, run_id) == (State.FAILED, Reason.NODE_REBOOTED)
    world.run_for(60)
    assert outcome(world, again) == (State.SUCCEEDED, Reason.COMPLETED)
    assert [one.fence for one in world.executions(again)] == [1, 2]


def test_F22_a_node_that_never_returns_keeps_its_devices_until_the_fence(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=None)
    run_id = world.submit(6)
    world.run_for(3)
    world.agents["n1"].kill()
    world.run_for(60)
    assert world.run(run_id).state is State.UNREACHABLE
    waiting = world.submit(8)
    world.run_for(5)
    assert world.services is not None
    assert golden("server.cluster.been-heard-since") in world.services.sentences.of(waiting)
    world.run_for(30)
    assert outcome(world, run_id) == (State.LOST, Reason.NODE_GONE)


def test_F22_an_operator_who_knows_shortens_it(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=None)
    run_id = world.submit(6, resume=True)
    world.run_for(3)
    world.agents["n1"].reboot()
    world.agents["n1"].kill()
    assert world.services is not None
    world.services.nodes.forget(ROOT, "n1", known_dead=True)
    assert world.run(run_id).state is State.QUEUED
    world.run_for(5)
    assert world.run(run_id).state is State.QUEUED  # n2 has four
    assert golden("server.cluster.largest-n2") in world.services.sentences.of(run_id)


def test_F31_killed_after_the_intent_the_run_starts_after_the_restart_once(
    world: World, crashing: pytest.MonkeyPatch
) -> None:
    crashing.setenv(faults.VARIABLE, "after_commit_before_launch")
    run_id = world.submit(2)
    world.run_for(5)
    assert world.services is None
    assert world.run(run_id).state is State.STARTING
    crashing.delenv(faults.VARIABLE)
    world.run_for(20)
    world.start_server()
    world.run_for(30)
    assert outcome(world, run_id) == (State.SUCCEEDED, Reason.COMPLETED)
    assert [one.fence for one in world.executions(run_id)] == [1]


def test_F32_killed_after_the_launch_before_the_ack_the_run_is_adopted(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=40)
    run_id = world.submit(6)
    node = world.agents["n1"]
    node.forgets_to_acknowledge = True
    world.run_for(3)
    world.kill_server()
    world.run_for(10)
    node.kill()
    world.start_server()
    node.start()
    node.forgets_to_acknowledge = False
    world.run_for(60)
    assert outcome(world, run_id) == (State.SUCCEEDED, Reason.COMPLETED)
    assert len(world.executions(run_id)) == 1


@pytest.mark.parametrize("place", ["after_upload_before_state", "after_report_before_answer"])
def test_F33_killed_around_the_ending_the_result_is_there_after_the_restart(
    world: World, crashing: pytest.MonkeyPatch, place: str
) -> None:
    world.work = lambda start: SimulatedWork(run_s=5)
    run_id = world.submit(2)
    world.run_for(3)
    crashing.setenv(faults.VARIABLE, place)
    world.run_for(6)
    crashing.delenv(faults.VARIABLE)
    if world.services is None:
        world.start_server()
    world.run_for(10)
    assert outcome(world, run_id) == (State.SUCCEEDED, Reason.COMPLETED)
    assert len(world.executions(run_id)) == 1


def test_a_server_that_was_away_for_a_day_gives_nobody_up_for_it(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=30)
    run_id = world.submit(6)
    world.run_for(3)
    world.kill_server()
    world.agents["n1"].kill()  # nobody talks; the supervisor goes on, within its grace
    world.run_for(50)
    world.clock.advance(86_400)
    world.start_server()
    world.run_for(10)
    assert world.run(run_id).state in (State.RUNNING, State.STARTING)
    world.agents["n1"].start()
    world.run_for(10)
    assert outcome(world, run_id) == (State.SUCCEEDED, Reason.COMPLETED)


def test_an_order_that_never_left_is_taken_back_and_the_run_placed_elsewhere(world: World) -> None:
    run_id = world.submit(4)
    assert world.services is not None
    node = world.agents["n2"]  # the smaller one, so it is taken
    world.scheduler.tick(world.clock.boottime_ns())
    node.kill()
    world.run_for(30)
    assert outcome(world, run_id) == (State.SUCCEEDED, Reason.COMPLETED)
    assert [(one.node, one.fence) for one in world.executions(run_id)] == [("n1", 2)]
    node.start()
    world.run_for(10)
    assert [one.fence for one in world.executions(run_id)] == [2]


def test_cancel_reaches_the_node_and_preempt_lets_a_run_go_on_that_asked_for_it(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=None)
    cancelled, resumed = world.submit(6), world.submit(4, resume=True)
    world.run_for(3)
    world.stop(cancelled)
    world.stop(resumed, StopReason.PREEMPT)
    world.work = lambda start: SimulatedWork(run_s=2)
    world.run_for(10)
    assert outcome(world, cancelled) == (State.CANCELLED, Reason.CANCELLED)
    assert outcome(world, resumed) == (State.SUCCEEDED, Reason.COMPLETED)
    assert [one.fence for one in world.executions(resumed)] == [1, 2]


def test_a_node_that_the_engine_lost_gets_nothing_until_it_is_back(world: World) -> None:
    engine = world.engine
    assert isinstance(engine, SimulatedEngine)
    world.agents["n1"].kill()
    world.agents["n2"].kill()
    engine.lose("n1", "lost power")
    world.run_for(3)
    run_id = world.submit(8)
    assert world.services is not None
    world.run_for(2)
    assert golden("server.cluster.n1-counted-lost") in world.services.sentences.of(run_id)
    engine.bring_back("n1")
    for agent in world.agents.values():
        agent.start()
    world.run_for(5)
    assert outcome(world, run_id) == (State.SUCCEEDED, Reason.COMPLETED)


def test_a_run_that_stops_for_hours_is_not_ended_while_its_node_is_heard_of(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=None, stop_s=300)
    run_id = world.submit(1, grace_s=1.0)
    world.run_for(3)
    world.stop(run_id)
    world.run_for(2)
    world.kill_server()
    world.run_for(20)
    world.clock.step_wall(86_400)  # a laptop that was closed, a clock that was set
    world.start_server()
    world.run_for(30)
    assert world.run(run_id).state is State.STOPPING
    world.run_for(300)
    assert outcome(world, run_id) == (State.CANCELLED, Reason.CANCELLED)


def test_F18_a_server_that_grants_less_than_the_one_before_waits_for_what_that_one_granted(
    database: Database, tmp_path: Path
) -> None:
    world = World(database, tmp_path, {"n1": "H100:1", "n2": "H100:1"}, **{**QUICK, "partition_grace_s": 600.0})
    world.work = lambda start: SimulatedWork(run_s=900)
    run_id = world.submit(1, retries=1)
    world.run_for(10)
    (first,) = world.executions(run_id)
    node = world.agents[first.node]
    node.reaches = False
    world.kill_server()
    world.start_server(partition_grace_s=60.0)
    world.run_for(300, step_s=5)
    assert first.ended_ns is None and world.run(run_id).state is State.UNREACHABLE
    world.run_for(700, step_s=5)
    assert [one.fence for one in world.executions(run_id)] == [1, 2]
    world.assert_sound()


def test_a_receipt_that_never_comes_does_not_keep_a_run_open_for_ever(world: World) -> None:
    world.work = lambda start: SimulatedWork(run_s=1, gate_s=1_000)
    run_id = world.submit(2)
    world.run_for(5)
    assert not world.run(run_id).finished
    world.run_for(200)
    assert world.run(run_id).finished


ACTIONS = st.sampled_from(
    [
        "submit",
        "large",
        "wait",
        "cut",
        "heal",
        "kill agent",
        "start agent",
        "reboot",
        "kill server",
        "start server",
        "stop",
    ]
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 1), st.integers(0, 5)), max_size=25))
def test_whatever_happens_the_cluster_stays_sound_and_every_run_ends(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("world")
    database = Database(f"sqlite:///{directory}/server.db", clock=SystemClock())
    database.migrate()
    try:
        world = World(database, directory, NODES, **QUICK)
        world.work = lambda start: SimulatedWork(run_s=7)
        submitted = [world.submit(2, retries=2)]
        for action, which, amount in actions:
            _act(world, action, list(world.agents.values())[which], amount, submitted)
        for agent in world.agents.values():
            agent.reaches = agent.hears = True
            agent.start()
        if world.services is None:
            world.start_server()
        world.run_for(240, step_s=2)
        world.assert_sound()
        assert {world.run(run_id).state for run_id in submitted} <= TERMINAL
    finally:
        database.close()


def _act(world: World, action: str, agent: SimulatedAgent, amount: int, submitted: list[str]) -> None:

    if action in ("submit", "large") and world.services is not None:
        submitted.append(world.submit(8 if action == "large" else 1 + amount % 4, retries=amount % 2))
    elif action == "stop" and world.services is not None:
        run_id = submitted[amount % len(submitted)]
        if world.run(run_id).state not in TERMINAL:
            world.stop(run_id)
    elif action == "wait":
        world.run_for(1 + amount * 12, step_s=1)
    elif action == "cut":
        agent.reaches, agent.hears = amount % 2 == 0, amount % 3 == 0
    elif action == "heal":
        agent.reaches = agent.hears = True
    elif action == "kill agent":
        agent.kill()
    elif action == "start agent":
        agent.start()
    elif action == "reboot":
        agent.reboot()
    elif action == "kill server":
        world.kill_server()
    elif action == "start server" and world.services is None:
        world.start_server()
    world.run_for(2, step_s=1)
