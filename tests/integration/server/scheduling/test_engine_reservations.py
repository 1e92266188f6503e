"""Gangs on nodes of an engine: nothing of one leaves before the engine has reserved it, whatever happens meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.engines.base import EngineNode, Impossible, Waiting
from serverless_gpu.engines.simulated_engine import Reservations, SimulatedEngine
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, StopAsked
from serverless_gpu.model.spec import Resources
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import events
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.scheduling.reconciler import Reconciler
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import AttemptSeen, Order, Start, Stop
from tests.support.golden import golden
from tests.support.server.agents import NODE, _insert, find, hello, tell
from tests.support.server.ganged import happened, say, wrong
from tests.support.server.made import made_services
from tests.support.server.stored import add_people, new_run

pytestmark = pytest.mark.any_database

DEVICES = parse_fake("H100:2")
LOST = Waiting(sentence="the Ray head at 10.0.0.1:7900 is lost")
MEETS = "n1, n2 prepare and connect to each other"


class Pool:
    """A server, an engine, and two nodes of two devices each that hang on its words.

    Args:
        services: the server's.
        home: for another server on the same database.
        engine_nodes: those of the nodes that are the engine's.
    """

    def __init__(self, services: Services, home: Path, *engine_nodes: str) -> None:
        self.home, self.clock = home, services.clock
        self._nodes = [EngineNode(name=name, devices=DEVICES) for name in engine_nodes]
        self.reservations = Reservations()
        add_people(services.database, "node", "alice")  # type: ignore[arg-type] # a Database
        self.ids: dict[str, str] = {}
        self._serve(services)
        self.say_hello()

    def _serve(self, services: Services) -> None:
        self.services = services
        self.engine = SimulatedEngine(self._nodes, self.reservations)
        self.scheduler = make_scheduler(services, engine=self.engine)
        self.reconciler = services.make(Reconciler, scheduler=self.scheduler, engine=self.engine)

    def restart(self, *answers: Waiting | Impossible) -> None:
        """Have another server on the same database, which has not ticked yet."""
        self._serve(made_services(self.services.database, self.home, clock=self.clock))
        self.engine.answers += answers

    def say_hello(self, *names: str, **said: Any) -> None:
        for name in names or ("n1", "n2"):
            greeting = hello(name, machine=name, devices=DEVICES, takes=("crews",), **said)
            self.ids[name] = self.services.agents.hello(NODE, greeting).node

    def tick(self) -> None:
        now_ns = self.services.clock.boottime_ns()
        self.scheduler.tick(now_ns)
        self.reconciler.tick(now_ns)

    def orders(self) -> dict[str, list[type[Order]]]:
        """Return what has left for each node."""
        told = {name: self.services.agents.waiting(NODE, node_id) for name, node_id in self.ids.items()}
        return {name: [type(order) for order in orders] for name, orders in told.items() if orders}

    def find(self, run_id: str) -> StoredRun:
        return find(self.services, run_id)

    def told(self, run_id: str) -> str:
        return run_views.sentence(self.find(run_id))


@pytest.fixture
def pool(services: Services, tmp_path: Path) -> Pool:
    """Return a pool whose nodes are both the engine's."""
    return Pool(services, tmp_path, "n1", "n2")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def submit(services: Services) -> str:
    """Write a run that waits for all there is."""
    new = new_run(resources=Resources(gpus=4, gpu_type="H100"), environment="snapshot")
    return _insert(services, msgspec.structs.replace(new, context_sealed=services.sealer.seal(b"{}", about=new.id)))


def gated(pool: Pool, answer: Waiting = LOST) -> str:
    """Return a run that was placed on both nodes and that the engine has not reserved."""
    pool.engine.answers = [answer]
    run_id = submit(pool.services)
    pool.tick()
    assert pool.find(run_id).state is State.STARTING, pool.services.sentences.of(run_id)
    assert pool.engine.recover() == []
    return run_id


def is_over(pool: Pool, run_id: str) -> bool:
    run = pool.find(run_id)
    assert run.attempt is not None
    return not run.attempt.open_crews and run.attempt.settled_ns is not None and pool.engine.recover() == []


def test_both_orders_leave_once_both_nodes_are_reserved_and_why_they_do_not_is_said(pool: Pool) -> None:
    run_id = gated(pool)
    assert (pool.orders(), pool.told(run_id)) == ({}, LOST.sentence)
    seen = {name: pool.services.hub.version(f"node:{node_id}") for name, node_id in pool.ids.items()}
    pool.tick()
    assert pool.engine.recover() == [f"{run_id}:1"]
    assert all(pool.services.hub.version(f"node:{pool.ids[name]}") > version for name, version in seen.items())
    assert (pool.orders(), pool.told(run_id)) == ({"n1": [Start], "n2": [Start]}, MEETS)


def test_a_gang_that_is_on_other_nodes_too_waits_as_a_whole(services: Services, tmp_path: Path) -> None:
    pool = Pool(services, tmp_path, "n2")
    run_id = gated(pool)
    assert pool.orders() == {}
    pool.tick()
    assert pool.orders() == {"n1": [Start], "n2": [Start]}
    (reserved,) = pool.reservations.gangs.values()
    assert [share.node for share in reserved.shares] == ["n2"] and reserved.id == f"{run_id}:1"


def test_nodes_that_are_not_the_engines_do_not_wait_for_it(services: Services, tmp_path: Path) -> None:
    pool = Pool(services, tmp_path, "other")
    pool.engine.answers = [LOST]
    submit(pool.services)
    pool.tick()
    assert pool.orders() == {"n1": [Start], "n2": [Start]}
    assert pool.engine.answers == [LOST] and pool.engine.recover() == []


def test_a_node_that_the_engine_has_lost_is_still_its_own(pool: Pool) -> None:
    pool.engine.lose("n2", "does not answer")
    run_id = submit(pool.services)
    pool.scheduler.tick(pool.clock.boottime_ns())  # before anybody has heard of that
    assert (pool.orders(), pool.told(run_id)) == ({}, golden("server.engine_gate.n2-does-answer"))


def test_what_can_never_be_reserved_goes_back_whole_and_is_placed_again(pool: Pool, clock: FakeClock) -> None:
    run_id = gated(pool)
    pool.engine.answers = [Impossible(sentence="n2 has 1 H100, not 2")]
    pool.tick()
    assert (pool.find(run_id).state, pool.orders(), is_over(pool, run_id)) == (State.QUEUED, {}, True)
    assert pool.find(run_id).infra_retries_used == 1
    clock.advance(1)
    pool.say_hello()
    pool.tick()
    assert pool.find(run_id).fence == 2 and pool.orders() == {"n1": [Start], "n2": [Start]}


@pytest.mark.parametrize(
    ("why", "state"), [(StopReason.CANCEL, State.CANCELLED), (StopReason.PREEMPT, State.QUEUED)], ids=str
)
def test_who_is_asked_to_stop_before_it_is_reserved_is_over_at_once(pool: Pool, why: StopReason, state: State) -> None:
    run_id = gated(pool)
    seen = pool.services.hub.version("scheduler")
    tell(pool.services, run_id, StopAsked(why))
    assert pool.services.hub.version("scheduler") > seen
    pool.scheduler._reserving.look(pool.scheduler._planning.read().capacity.active)
    run = pool.find(run_id)
    assert (run.state, run.infra_retries_used, is_over(pool, run_id)) == (state, 0, True)
    assert run.finished == (state is State.CANCELLED) and pool.orders() == {}
    assert wrong(pool.services.database) == []  # type: ignore[arg-type] # a Database


def test_who_is_asked_to_stop_once_its_orders_left_is_stopped_by_its_nodes(pool: Pool) -> None:
    run_id = gated(pool)
    pool.tick()
    assert pool.orders() == {"n1": [Start], "n2": [Start]}
    for crew in (0, 1):
        say(pool.services, run_id, crew, State.STARTING, sentence="it is prepared")
    pool.engine.release(f"{run_id}:1")  # whatever becomes of the reservation
    tell(pool.services, run_id, StopAsked(StopReason.CANCEL))
    pool.tick()
    assert pool.find(run_id).state is State.STOPPING and pool.orders() == {"n1": [Stop], "n2": [Stop]}


def test_nobody_is_missed_while_the_head_is_away_for_hours(pool: Pool, clock: FakeClock) -> None:
    run_id = gated(pool)
    for _ in range(12):
        clock.advance(1_000)
        pool.say_hello()
        pool.engine.answers = [LOST]
        pool.tick()
    run = pool.find(run_id)
    assert (run.state, run.fence, pool.orders()) == (State.STARTING, 1, {})
    assert run.attempt is not None and not run.attempt.called_off
    pool.tick()
    pool.tick()
    assert pool.orders() == {"n1": [Start], "n2": [Start]} and pool.find(run_id).state is State.STARTING


def test_a_node_that_goes_away_meanwhile_takes_the_gang_with_it(pool: Pool, clock: FakeClock) -> None:
    run_id = gated(pool)
    for _ in range(7):
        clock.advance(15)
        pool.say_hello("n1")
        pool.engine.answers = [LOST]
        pool.tick()
    run = pool.find(run_id)
    assert run.state is State.QUEUED and is_over(pool, run_id)
    told = pool.services.database.read(lambda connection: events.after(connection, run_id, 0))
    assert golden("server.engine_gate.n2-went-away") in told[-1].sentence


def test_F31_a_server_that_starts_again_holds_back_the_same_orders_before_its_first_tick(pool: Pool) -> None:
    run_id = gated(pool)
    pool.restart(LOST)
    assert pool.orders() == {}
    pool.tick()
    assert (pool.orders(), pool.told(run_id)) == ({}, LOST.sentence)
    pool.tick()
    assert (pool.orders(), pool.told(run_id)) == ({"n1": [Start], "n2": [Start]}, MEETS)
    pool.restart()
    assert pool.orders() == {"n1": [Start], "n2": [Start]}


def test_what_an_earlier_server_said_is_not_said_any_more_once_it_is_reserved(pool: Pool) -> None:
    run_id = gated(pool)
    pool.restart()
    pool.tick()
    assert (pool.orders(), pool.told(run_id)) == ({"n1": [Start], "n2": [Start]}, MEETS)


@pytest.mark.parametrize("ends", ["impossible", "cancel"])
def test_F31_what_was_held_back_by_a_server_that_was_killed_can_be_taken_back_by_the_next(
    pool: Pool, ends: str
) -> None:
    run_id = gated(pool)
    pool.restart(LOST)
    pool.tick()
    if ends == "impossible":
        pool.engine.answers = [Impossible(sentence="no such node")]
    else:
        tell(pool.services, run_id, StopAsked(StopReason.CANCEL))
    pool.tick()
    expected = State.QUEUED if ends == "impossible" else State.CANCELLED
    assert (pool.find(run_id).state, pool.orders(), is_over(pool, run_id)) == (expected, {}, True)


@pytest.mark.parametrize("known_by", ["its word about the order", "its hello"])
def test_what_a_node_has_is_not_taken_back_though_the_engine_has_forgotten_it(pool: Pool, known_by: str) -> None:
    run_id = gated(pool)
    pool.tick()
    orders = pool.services.agents.waiting(NODE, pool.ids["n1"])
    if known_by == golden("server.engine_gate.word-about-order"):
        pool.services.agents.take(NODE, pool.ids["n1"], [order.seq for order in orders])
    pool.engine.release(f"{run_id}:1")
    pool.restart(LOST, Impossible(sentence="no such node"))
    pool.tick()
    if known_by == "its hello":
        pool.say_hello("n1", attempts=(AttemptSeen(run_id=run_id, fence=1, state=State.STARTING),))
    pool.tick()
    assert pool.find(run_id).state is State.STARTING and pool.told(run_id) == "no such node"
    tell(pool.services, run_id, StopAsked(StopReason.CANCEL))
    pool.tick()
    assert pool.find(run_id).state is State.STOPPING and pool.orders()["n1"] == [Stop]


def test_nodes_are_given_back_to_the_engine_when_all_of_the_gang_is_over(pool: Pool, database: Database) -> None:
    run_id = gated(pool)
    pool.tick()
    say(pool.services, run_id, 1, State.STARTING, sentence="it is prepared")
    happened(database, run_id, 0, AttemptEnded(Reason.START_FAILED, began=False))
    pool.tick()
    assert pool.engine.recover() == [f"{run_id}:1"]
    happened(database, run_id, 1, AttemptEnded(Reason.PEER_FAILED, began=False))
    pool.reconciler.tick(pool.clock.boottime_ns())
    assert pool.engine.recover() == []
