"""The engine of a Ray cluster, over a child that plays Ray: the suite, and what follows when Ray does not answer.

Real Ray is met in `tests/e2e/ray/test_engine.py`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu.engines.base import Gang, Impossible, NodeLost, NodeUp, Placed, Share, Waiting
from serverless_gpu.engines.ray import ray_engine as module
from serverless_gpu.engines.ray.driver_client import RayAccess
from serverless_gpu.engines.ray.ray_engine import RayEngine
from serverless_gpu.testing.engines import EngineConformance, Losing, Shares
from tests.support.engines.fake_ray_cluster import FakeRay
from tests.support.golden import golden
from tests.support.local.observe import wait_for

H100 = {"GPU": 4.0, "CPU": 2.0, "sgpu_gpus:H100": 4.0}
A10 = {"GPU": 2.0, "CPU": 2.0, "sgpu_gpus:A10": 2.0}
TWO = Gang(id="r:1", shares=(Share(node="n1", gpu_type="H100", count=2), Share(node="n2", gpu_type="H100", count=1)))
WHOLE = Gang(id="w:1", shares=(Share(node="n1", gpu_type="H100", count=4),))


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[FakeRay]:
    """Yield a cluster of three nodes."""
    directory = tmp_path / "cluster"
    directory.mkdir()
    fake = FakeRay(directory, {"n1": H100, "n2": H100, "n3": A10})
    yield fake
    fake.close()


@pytest.fixture
def made(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RayEngine]]:
    """Yield what makes an engine that has looked at Ray; each is closed with the test."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.1)
    engines: list[RayEngine] = []

    def make(*, pool: str = "p", ready: bool = True, news: Callable[[], None] = lambda: None) -> RayEngine:
        access = RayAccess(address=f"127.0.0.1:{ray.port}", node_address="127.0.0.10", pool=pool, variables={})
        engine = RayEngine(tmp_path / f"engine-{pool}", access=access, python=str(ray.python), news=news)
        engines.append(engine)
        assert not ready or engine.ready(30)
        return engine

    yield make
    for engine in engines:
        engine.close()


class TestRayEngine(EngineConformance):
    """The suite."""

    @pytest.fixture
    def engine(self, made: Callable[..., RayEngine], monkeypatch: pytest.MonkeyPatch) -> RayEngine:
        """Return an engine with nothing reserved, which waits for the answers of a busy machine."""
        monkeypatch.setattr(module, "SOON_S", 30.0)
        return made()

    @pytest.fixture
    def restarted(self, made: Callable[..., RayEngine]) -> Callable[[], RayEngine]:
        """Return what makes the next one."""
        return made

    @pytest.fixture
    def shares(self) -> Shares:
        """Return a gang on two nodes."""
        return TWO.shares

    @pytest.fixture
    def full(self) -> Shares | None:
        """Return a whole node."""
        return WHOLE.shares

    @pytest.fixture
    def too_many(self) -> Shares | None:
        """Return more than a node has."""
        return (Share(node="n3", gpu_type="A10", count=3),)

    @pytest.fixture
    def spread(self) -> Shares | None:
        """Return more than half of two nodes."""
        return (Share(node="n1", gpu_type="H100", count=3), Share(node="n3", gpu_type="A10", count=2))

    @pytest.fixture
    def losing(self, ray: FakeRay) -> Losing | None:
        """Return a node that misses heartbeats."""
        return Losing(WHOLE.shares, lambda: ray.lose("n1"), lambda: ray.bring_back("n1", H100))


def ask(engine: RayEngine, gang: Gang) -> Placed | Waiting | Impossible:
    """Return what an engine says to a gang."""
    return engine.submit(engine.plan(gang))


def test_what_ray_has_not_is_said_with_figures(ray: FakeRay, made: Callable[..., RayEngine]) -> None:
    with ray.changed() as state:
        bundle = {"GPU": 3.0, "sgpu_node:n1": 0.001}
        state["groups"]["theirs"] = {"name": "theirs", "state": "CREATED", "bundles": [bundle]}
    engine = made()
    assert ask(engine, WHOLE) == Waiting(sentence="Ray reports 1 of 4 H100 free on n1")
    assert ask(engine, Gang(id="a:1", shares=(Share(node="n1", gpu_type="A10", count=1),))) == Impossible(
        sentence="n1 has 0 A10, not 1"
    )
    assert engine.plan(TWO).text == golden("engines.ray_engine.reserve-ray-h100")
    assert engine.recover() == []


def test_servers_that_share_a_cluster_leave_each_others_gangs_alone(made: Callable[..., RayEngine]) -> None:
    one, other = made(pool="one"), made(pool="other")
    assert ask(one, WHOLE) == Placed(gang=WHOLE)
    assert isinstance(ask(other, WHOLE), Waiting)
    assert (one.recover(), other.recover()) == (["w:1"], [])
    other.release("w:1")
    assert isinstance(ask(other, WHOLE), Waiting)


def test_a_head_that_is_gone_loses_no_node_and_new_gangs_wait(ray: FakeRay, made: Callable[..., RayEngine]) -> None:
    engine = made()
    ask(engine, TWO)
    engine.events()
    ray.head_ends()
    gone = Waiting(sentence=f"the Ray head at 127.0.0.1:{ray.port} does not answer; running attempts continue")
    wait_for(lambda: ask(engine, WHOLE) == gone, "the head is missed")
    assert ask(engine, TWO) == Placed(gang=TWO)
    assert [node.name for node in engine.nodes()] == ["n1", "n2", "n3"]
    assert engine.events() == []
    assert ask(engine, Gang(id="x:1", shares=(Share(node="n9", gpu_type="H100", count=1),))) == Impossible(
        sentence="the Ray cluster has no node 'n9'"
    )
    ray.head_comes_back(empty=False)
    other = Gang(id="o:1", shares=(Share(node="n2", gpu_type="H100", count=1),))
    wait_for(lambda: ask(engine, other) == Placed(gang=other), "the head is back")
    assert engine.events() == []


def test_a_server_that_starts_without_a_head_knows_nodes_and_gangs(
    ray: FakeRay, made: Callable[..., RayEngine]
) -> None:
    first = made()
    ask(first, TWO)
    ray.lose("n3")
    wait_for(lambda: len(first.nodes()) == 2, "n3 is lost")
    first.close()
    ray.head_ends()
    engine = made(ready=False)
    assert engine.recover() == ["r:1"]
    assert [event.node.name for event in engine.events() if isinstance(event, NodeUp)] == ["n1", "n2"]
    assert engine.has("n3") and not engine.has("n9")
    assert ask(engine, TWO) == Placed(gang=TWO)
    answer = ask(engine, WHOLE)
    assert isinstance(answer, Waiting) and "the Ray head" in answer.sentence


def test_a_head_that_forgot_everything_is_asked_again_for_what_runs(
    ray: FakeRay, made: Callable[..., RayEngine]
) -> None:
    engine = made()
    ask(engine, TWO)
    ray.head_ends()
    wait_for(lambda: isinstance(ask(engine, WHOLE), Waiting), "the head is missed")
    ray.head_comes_back(empty=True)

    def reserved() -> bool:
        with ray.changed() as state:
            return "sgpu:p:r:1" in state["groups"]

    wait_for(reserved, "the gang is reserved again")
    assert engine.recover() == ["r:1"]


def test_a_child_that_is_killed_is_started_again(ray: FakeRay, made: Callable[..., RayEngine]) -> None:
    engine = made()
    engine.events()
    with ray.changed() as state:
        os.kill(int(state["child"]), signal.SIGKILL)
    wait_for(lambda: ask(engine, WHOLE) == Placed(gang=WHOLE), "another child answers")
    assert engine.events() == []


def test_an_answer_that_does_not_come_costs_the_child_and_nobody_waits_for_it(
    ray: FakeRay, made: Callable[..., RayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESERVE_S", 1.0)
    rung = threading.Event()
    engine = made(news=rung.set)
    with ray.changed() as state:
        state["late"] = ["reserve"]
        first = state["child"]
    assert ask(engine, WHOLE) == Waiting(sentence="Ray is reserving w:1")
    assert rung.wait(30)
    with ray.changed() as state:
        state["late"] = []
    wait_for(lambda: ask(engine, WHOLE) == Placed(gang=WHOLE), "another child answers")
    with ray.changed() as state:
        assert state["child"] != first


def test_what_is_given_back_while_ray_reserves_it_is_not_kept(
    ray: FakeRay, made: Callable[..., RayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SOON_S", 0.0)
    engine = made()
    with ray.changed():  # nothing is answered meanwhile
        assert ask(engine, WHOLE) == Waiting(sentence="Ray is reserving w:1")
        engine.release("w:1")
        assert engine.recover() == []

    def free() -> bool:
        with ray.changed() as state:
            return not state["groups"] and state["asked"].get("release", 0) > 0

    wait_for(free, "it is given back")
    assert engine.recover() == []


def test_what_a_killed_child_left_half_reserved_is_removed(ray: FakeRay, made: Callable[..., RayEngine]) -> None:
    made()
    with ray.changed() as state:
        stats = {"scheduling_state": "NO_RESOURCES"}
        state["groups"]["sgpu:p:x:1"] = {"name": "sgpu:p:x:1", "state": "PENDING", "bundles": [], "stats": stats}

    def gone() -> bool:
        with ray.changed() as state:
            return not state["groups"]

    wait_for(gone, "it is removed")


def test_a_node_without_an_agent_is_lost_until_it_has_one(
    ray: FakeRay, made: Callable[..., RayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGENT_LOOK_EVERY_S", 0.1)
    with ray.changed() as state:
        state["agents"]["id-n2"] = {"problem": "its agent was not started: no such file"}
    engine = made()
    wait_for(lambda: [node.name for node in engine.nodes()] == ["n1", "n3"], "n2 is not counted on")
    answer = ask(engine, TWO)
    assert answer == Waiting(sentence="n2 has no agent: its agent was not started: no such file")
    assert not any(isinstance(event, NodeUp) and event.node.name == "n2" for event in engine.events())
    with ray.changed() as state:
        state["agents"] = {}
    wait_for(lambda: ask(engine, TWO) == Placed(gang=TWO), "n2 has an agent")
    assert [event.node.name for event in engine.events() if isinstance(event, NodeUp)] == ["n2"]


def test_an_actor_that_says_nothing_is_no_loss_at_first(ray: FakeRay, made: Callable[..., RayEngine]) -> None:
    with ray.changed() as state:
        state["problems"]["agent"] = "ActorUnavailableError: The actor is temporarily unavailable"
    engine = made()

    def asked() -> bool:
        with ray.changed() as state:
            return int(state["asked"].get("agent", 0)) >= 3

    wait_for(asked, "actors are asked")
    assert len(engine.nodes()) == 3
    assert not any(isinstance(event, NodeLost) for event in engine.events())


def test_actors_that_say_nothing_again_and_again_leave_a_node_without_an_agent(
    ray: FakeRay, made: Callable[..., RayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGENT_LOOK_EVERY_S", 0.1)
    engine = made()
    engine.events()
    with ray.changed() as state:
        state["problems"]["agent"] = "ActorDiedError: it died"
    wait_for(lambda: not engine.nodes(), "the nodes are not counted on")
    sentence = "has no agent: ActorDiedError: it died"
    assert [event for event in engine.events() if event.node == "n3"] == [NodeLost(node="n3", sentence=sentence)]
