"""The simulated engine obeys the suite, and does what a test asks of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serverless_gpu.engines.base import EngineNode, Gang, Impossible, NodeLost, NodeUp, Placed, Share, Waiting
from serverless_gpu.engines.simulated_engine import Reservations, SimulatedEngine
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.testing.engines import EngineConformance, Losing, Shares
from tests.support.golden import golden

NODES = (
    EngineNode(name="n1", devices=parse_fake("H100:8")),
    EngineNode(name="n2", devices=parse_fake("H100:4,A10:2")),
)


class TestSimulatedEngine(EngineConformance):
    """The suite."""

    @pytest.fixture
    def reservations(self) -> Reservations:
        """Return what survives the engine."""
        return Reservations()

    @pytest.fixture
    def engine(self, reservations: Reservations) -> SimulatedEngine:
        """Return an empty cluster."""
        return SimulatedEngine(NODES, reservations)

    @pytest.fixture
    def restarted(self, reservations: Reservations) -> Callable[[], SimulatedEngine]:
        """Return what starts the next engine."""
        return lambda: SimulatedEngine(NODES, reservations)

    @pytest.fixture
    def shares(self) -> Shares:
        """Return a gang on two nodes."""
        return (Share(node="n1", gpu_type="H100", count=2), Share(node="n2", gpu_type="A10", count=1))

    @pytest.fixture
    def full(self) -> Shares | None:
        """Return a whole node."""
        return (Share(node="n1", gpu_type="H100", count=8),)

    @pytest.fixture
    def too_many(self) -> Shares | None:
        """Return more than a node has."""
        return (Share(node="n2", gpu_type="A10", count=3),)

    @pytest.fixture
    def spread(self) -> Shares | None:
        """Return more than half of two nodes."""
        return (Share(node="n1", gpu_type="H100", count=5), Share(node="n2", gpu_type="A10", count=2))

    @pytest.fixture
    def losing(self, engine: SimulatedEngine) -> Losing | None:
        """Return a node that loses power."""
        shares = (Share(node="n1", gpu_type="H100", count=1),)
        return Losing(shares, lambda: engine.lose("n1", "lost power"), lambda: engine.bring_back("n1"))


def test_sentences_say_what_is_missing() -> None:
    engine = SimulatedEngine(NODES)

    def ask(gang: str, count: int) -> object:
        shares = (Share(node="n2", gpu_type="A10", count=count),)
        return engine.submit(engine.plan(Gang(id=gang, shares=shares)))

    assert ask("a:1", 3) == Impossible(sentence="n2 has 2 A10, not 3")
    assert isinstance(ask("b:1", 1), Placed)
    assert ask("c:1", 2) == Waiting(sentence="1 of 2 A10 are free on n2")
    assert engine.plan(Gang(id="a:1", shares=(Share(node="n2", gpu_type="A10", count=3),))).text == golden(
        "engines.simulated_engine.reserve-a10-n2"
    )


def test_a_lost_node_is_said_to_be_lost_and_keeps_its_reservations() -> None:
    engine = SimulatedEngine(NODES)
    gang = Gang(id="a:1", shares=(Share(node="n1", gpu_type="H100", count=1),))
    engine.submit(engine.plan(gang))
    engine.events()
    engine.lose("n1", "lost power")
    assert [node.name for node in engine.nodes()] == ["n2"]
    assert engine.events() == [NodeLost(node="n1", sentence="lost power")]
    other = Gang(id="b:1", shares=gang.shares)
    assert engine.submit(engine.plan(other)) == Waiting(sentence="n1 lost power")
    assert engine.recover() == ["a:1"]
    engine.bring_back("n1")
    engine.bring_back("n1")
    assert engine.events() == [NodeUp(node=NODES[0])]
    assert isinstance(engine.submit(engine.plan(other)), Placed)


def test_an_injected_answer_is_given_once() -> None:
    engine = SimulatedEngine(NODES)
    engine.answers = [Waiting(sentence="the cluster is asleep")]
    request = engine.plan(Gang(id="a:1", shares=(Share(node="n1", gpu_type="H100", count=1),)))
    assert engine.submit(request) == Waiting(sentence="the cluster is asleep")
    assert isinstance(engine.submit(request), Placed)
