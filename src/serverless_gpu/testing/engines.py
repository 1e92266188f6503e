"""Conformance tests for built-in and third-party engines.

    class TestMine(EngineConformance):
        @pytest.fixture
        def engine(self): return MyEngine(...)
        @pytest.fixture
        def shares(self): return (Share(node="n1", gpu_type="CPU", count=1),)    # fits while the engine is empty
        @pytest.fixture
        def restarted(self): return lambda: MyEngine(...)                        # with the state of the first one

Each test starts with a new engine that knows all its nodes and has no reservations. An engine that overrides further
fixtures enables further tests:

    full       shares that fit alone, but not twice: the engine counts devices
    too_many   shares that will never fit, on an existing node
    spread     shares on two nodes, each more than half of its node: the engine has several nodes
    losing     a node that the test can make the engine lose and recover

No test sleeps. The tests wait for slow events for at most `LIMIT_S` seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.engines.base import Engine, Gang, Impossible, NodeLost, NodeUp, Placed, Share, Waiting

Shares = tuple[Share, ...]
LIMIT_S = 60.0
_LOOK_S = 0.02


class Losing(NamedTuple):
    """A simulated node that the engine can lose.

    Attributes:
        shares: shares that fit on the node.
        lose: function that makes the engine lose the node, as in a real failure.
        bring_back: function that makes the node return.
    """

    shares: Shares
    lose: Callable[[], None]
    bring_back: Callable[[], None]


class EngineConformance:
    """Conformance tests for an engine."""

    @pytest.fixture
    def full(self) -> Shares | None:
        """Return device shares that fill a node, or None if the engine does not count devices."""
        return None

    @pytest.fixture
    def too_many(self) -> Shares | None:
        """Return device shares that never fit, or None if the engine does not count devices."""
        return None

    @pytest.fixture
    def spread(self) -> Shares | None:
        """Return device shares on two nodes, or None if the engine has only one node."""
        return None

    @pytest.fixture
    def losing(self) -> Losing | None:
        """Return a node that the engine can lose, or None if the engine cannot simulate a loss."""
        return None

    def test_every_node_is_said_to_be_up_before_anything_else(self, engine: Engine) -> None:
        """The first events of an engine report each of its nodes exactly once."""
        events = engine.events()
        assert [event.node for event in events if isinstance(event, NodeUp)] == list(engine.nodes())
        assert not any(isinstance(event, NodeLost) for event in events)
        assert engine.events() == []

    def test_names_of_nodes_are_unique(self, engine: Engine) -> None:
        """Each node of the engine has a unique name."""
        names = [node.name for node in engine.nodes()]
        assert len(set(names)) == len(names)
        assert all(engine.has(name) for name in names)
        assert not engine.has("no-such-node")

    def test_a_plan_says_what_it_would_do_and_does_nothing(self, engine: Engine, shares: Shares) -> None:
        """Planning a gang twice returns equal requests and reserves no devices."""
        gang = Gang(id="run:1", shares=shares)
        request = engine.plan(gang)
        assert request == engine.plan(gang)
        assert request.gang == gang
        assert all(word in request.text for word in ("run:1", *(share.node for share in shares)))
        assert engine.recover() == []

    def test_a_gang_that_fits_is_placed_and_again_it_is_the_same_one(self, engine: Engine, shares: Shares) -> None:
        """Submitting a gang again with the same identifier changes nothing."""
        gang = Gang(id="run:1", shares=shares)
        assert engine.submit(engine.plan(gang)) == Placed(gang=gang)
        assert engine.submit(engine.plan(gang)) == Placed(gang=gang)
        assert engine.recover() == ["run:1"]

    def test_a_node_that_does_not_exist_is_impossible_and_reserves_nothing(
        self, engine: Engine, shares: Shares
    ) -> None:
        """The engine refuses a gang with an unknown node, and the message names the node."""
        nowhere = Share(node="no-such-node", gpu_type=shares[0].gpu_type, count=1)
        answer = engine.submit(engine.plan(Gang(id="run:1", shares=(*shares, nowhere))))
        assert isinstance(answer, Impossible)
        assert "no-such-node" in answer.sentence
        assert engine.recover() == []
        assert isinstance(engine.submit(engine.plan(Gang(id="run:2", shares=shares))), Placed)

    def test_what_is_full_waits_and_is_free_after_a_release(self, engine: Engine, full: Shares | None) -> None:
        """A gang that does not fit waits with a message and reserves no devices."""
        if full is None:
            pytest.skip("the engine under test does not count devices")
        assert isinstance(engine.submit(engine.plan(Gang(id="run:1", shares=full))), Placed)
        answer = engine.submit(engine.plan(Gang(id="run:2", shares=full)))
        assert isinstance(answer, Waiting)
        assert answer.sentence
        assert engine.recover() == (["run:1", "run:2"] if engine.queues else ["run:1"])
        engine.release("run:1")
        assert isinstance(engine.submit(engine.plan(Gang(id="run:2", shares=full))), Placed)

    def test_a_release_may_come_twice_and_for_what_was_never_there(self, engine: Engine, shares: Shares) -> None:
        """Releasing an unknown or already released gang raises no error."""
        engine.submit(engine.plan(Gang(id="run:1", shares=shares)))
        for gang in ("run:1", "run:1", "never:1"):
            engine.release(gang)
        assert engine.recover() == []

    def test_another_attempt_of_a_run_is_another_gang(self, engine: Engine, shares: Shares) -> None:
        """Releasing a run's old attempt does not affect the new attempt."""
        engine.submit(engine.plan(Gang(id="run:1", shares=shares)))
        engine.release("run:1")
        engine.submit(engine.plan(Gang(id="run:2", shares=shares)))
        engine.release("run:1")
        assert engine.recover() == ["run:2"]

    def test_a_restart_finds_what_was_reserved(
        self, engine: Engine, restarted: Callable[[], Engine], shares: Shares
    ) -> None:
        """After a restart, the next process recovers each reserved gang."""
        gang = Gang(id="run:1", shares=shares)
        engine.submit(engine.plan(gang))
        engine.close()
        again = restarted()
        assert again.recover() == ["run:1"]
        assert again.submit(again.plan(gang)) == Placed(gang=gang)
        again.release("run:1")
        assert again.recover() == []
        again.close()

    def test_it_may_be_used_from_several_threads(self, engine: Engine, shares: Shares) -> None:
        """After concurrent submits and releases, a gang is either placed or absent."""
        gang = Gang(id="run:1", shares=shares)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: engine.submit(engine.plan(gang)), range(32)))
            assert answers == [Placed(gang=gang)] * 32
            list(pool.map(engine.release, ["run:1"] * 32))
        assert engine.recover() == []

    def test_more_than_a_node_has_is_impossible_and_not_waited_for(
        self, engine: Engine, too_many: Shares | None
    ) -> None:
        """The engine immediately refuses a gang that never fits, and the message names the node."""
        if too_many is None:
            pytest.skip("the engine under test does not count devices")
        answer = engine.submit(engine.plan(Gang(id="run:1", shares=too_many)))
        assert isinstance(answer, Impossible)
        assert too_many[0].node in answer.sentence
        assert engine.recover() == []

    def test_a_gang_on_two_nodes_is_one_gang_to_the_next_process_too(
        self, engine: Engine, restarted: Callable[[], Engine], spread: Shares | None
    ) -> None:
        """The engine reserves, recovers and releases a gang on two nodes as a whole."""
        if spread is None:
            pytest.skip("the engine under test has only one node")
        gang, parts = Gang(id="run:1", shares=spread), [Gang(id=f"part:{one.node}", shares=(one,)) for one in spread]
        assert engine.submit(engine.plan(gang)) == Placed(gang=gang)
        engine.close()
        again = restarted()
        assert again.recover() == ["run:1"]
        assert again.submit(again.plan(gang)) == Placed(gang=gang)
        assert [type(again.submit(again.plan(part))) for part in parts] == [Waiting, Waiting]
        assert again.recover() == ["run:1"]
        again.release("run:1")
        assert [again.submit(again.plan(part)) for part in parts] == [Placed(gang=part) for part in parts]
        for part in parts:
            again.release(part.id)
        assert again.recover() == []
        again.close()

    def test_half_a_gang_is_never_reserved(self, engine: Engine, spread: Shares | None) -> None:
        """A gang that fits only on one of its nodes reserves no devices there."""
        if spread is None:
            pytest.skip("the engine under test has only one node")
        first, second = (Gang(id=f"part:{one.node}", shares=(one,)) for one in spread)
        assert engine.submit(engine.plan(first)) == Placed(gang=first)
        answer = engine.submit(engine.plan(Gang(id="run:1", shares=spread)))
        assert isinstance(answer, Waiting)
        assert answer.sentence
        assert engine.recover() == [first.id]
        assert engine.submit(engine.plan(second)) == Placed(gang=second)

    def test_a_lost_node_is_told_once_keeps_its_gangs_and_may_come_back(
        self, engine: Engine, losing: Losing | None
    ) -> None:
        """A lost node keeps its current gangs, but accepts no new gangs."""
        if losing is None:
            pytest.skip("the engine under test cannot simulate the loss of a node")
        node = losing.shares[0].node
        others = [other for other in engine.nodes() if other.name != node]
        first, second = Gang(id="run:1", shares=losing.shares), Gang(id="run:2", shares=losing.shares)
        assert engine.submit(engine.plan(first)) == Placed(gang=first)
        engine.events()
        losing.lose()
        (lost,) = _heard(engine)
        assert isinstance(lost, NodeLost) and lost.node == node and lost.sentence
        assert engine.nodes() == others
        assert engine.has(node)
        assert engine.recover() == ["run:1"]
        answer = engine.submit(engine.plan(second))
        assert isinstance(answer, Waiting)
        assert answer.sentence
        assert engine.events() == []
        engine.release("run:1")
        assert engine.recover() == []
        losing.bring_back()
        (up,) = _heard(engine)
        assert isinstance(up, NodeUp) and up.node.name == node
        assert up.node in engine.nodes() and len(engine.nodes()) == len(others) + 1
        _wait(lambda: engine.submit(engine.plan(second)) == Placed(gang=second), f"{node} accepts gangs again")

    def test_closing_twice_is_closing(self, engine: Engine) -> None:
        """Closing an engine twice raises no error."""
        engine.close()
        engine.close()


def _heard(engine: Engine) -> list[NodeUp | NodeLost]:
    """Wait for at least one engine event, and return the new events."""
    heard: list[NodeUp | NodeLost] = []

    def listen() -> bool:
        heard.extend(engine.events())
        return bool(heard)

    _wait(listen, "the engine reports an event")
    return heard


def _wait(happens: Callable[[], bool], what: str) -> None:
    clock = SystemClock()
    until_ns = clock.boottime_ns() + round(LIMIT_S * 1e9)
    while not happens():
        assert clock.boottime_ns() < until_ns, f"{what}: not within {LIMIT_S:g} s"
        threading.Event().wait(_LOOK_S)
