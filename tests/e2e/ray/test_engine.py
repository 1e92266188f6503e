"""The engine of a Ray cluster, with a real one: a head and three nodes on addresses of the loopback interface.

One cluster serves all tests, in their order: the last ones end its nodes and its head, and start them again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from serverless_gpu.engines.base import Gang, Placed, Share, Waiting
from serverless_gpu.engines.ray import ray_engine
from serverless_gpu.engines.ray.ray_engine import RayEngine
from serverless_gpu.node.inside import linux
from serverless_gpu.testing.engines import EngineConformance, Losing, Shares
from tests.e2e.ray.clusters import Cluster, Machine, cluster
from tests.e2e.ray.plain_ray import PYTHON
from tests.support.local.observe import wait_for

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(420)]

READY_S = 90.0
LOST_S = 10.0
_pools = count()


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    """Yield a head and three nodes."""
    with cluster({"n1": ("H100",) * 4, "n2": ("H100",) * 4, "n3": ("A10", "A10", "CPU", "CPU")}) as made:
        yield made


@pytest.fixture
def made(ray: Cluster, tmp_path: Path) -> Iterator[Callable[..., RayEngine]]:
    """Yield what makes an engine of a server of its own; nothing that it reserved stays."""
    engines: list[RayEngine] = []
    access = ray.access(f"test{next(_pools)}")

    def make(directory: Path = tmp_path / "engine") -> RayEngine:
        engines.append(RayEngine(directory, access=access, python=str(PYTHON)))
        assert engines[-1].ready(READY_S)
        wait_for(lambda: len(engines[-1].nodes()) == 3, "all nodes are there", limit_s=READY_S)
        return engines[-1]

    yield make
    for engine in engines:
        for gang in engine.recover():
            engine.release(gang)
    for engine in engines:
        engine.close()


class TestRayEngine(EngineConformance):
    """The suite."""

    @pytest.fixture
    def engine(self, made: Callable[[], RayEngine]) -> RayEngine:
        """Return an engine with nothing reserved."""
        return made()

    @pytest.fixture
    def restarted(self, made: Callable[[], RayEngine]) -> Callable[[], RayEngine]:
        """Return what makes the next one."""
        return made

    @pytest.fixture
    def shares(self) -> Shares:
        """Return a gang on two nodes."""
        return (Share(node="n1", gpu_type="H100", count=2), Share(node="n2", gpu_type="H100", count=1))

    @pytest.fixture
    def full(self) -> Shares | None:
        """Return a whole node."""
        return (Share(node="n1", gpu_type="H100", count=4),)

    @pytest.fixture
    def too_many(self) -> Shares | None:
        """Return more than a node has."""
        return (Share(node="n3", gpu_type="A10", count=3),)

    @pytest.fixture
    def spread(self) -> Shares | None:
        """Return more than half of two nodes."""
        return (Share(node="n2", gpu_type="H100", count=3), Share(node="n3", gpu_type="CPU", count=2))

    @pytest.fixture
    def losing(self, ray: Cluster, engine: RayEngine) -> Losing | None:
        """Return a node whose Ray is killed, and started again: that is known soon, and its agent does not notice."""
        machine, before, killed_at = ray.nodes["n1"], agents(ray), 0.0

        def lose() -> None:
            nonlocal killed_at
            machine.kill()
            killed_at = time.monotonic()

        def bring_back() -> None:
            took_s = time.monotonic() - killed_at
            print(f"node lost: known after {took_s:.1f} s")
            assert took_s <= LOST_S
            assert agents(ray) == before
            machine.start(ray.address)
            machine.wait_ready(ray.address)
            wait_for(lambda: len(engine.nodes()) == 3, "the node is back", limit_s=READY_S)
            assert agents(ray) == before

        return Losing((Share(node="n1", gpu_type="H100", count=1),), lose, bring_back)


def ask(engine: RayEngine, gang: Gang) -> object:
    """Return what an engine says to a gang."""
    return engine.submit(engine.plan(gang))


def is_placed(engine: RayEngine, gang: Gang) -> bool:
    """Return whether an engine has a gang, asked for now if it has not."""
    return ask(engine, gang) == Placed(gang=gang)


def agents(ray: Cluster) -> dict[str, int]:
    """Return the agents of all nodes, once all have one."""
    found: dict[str, int | None] = {}

    def there() -> bool:
        found.update({name: machine.uplink() for name, machine in ray.nodes.items()})
        return None not in found.values()

    wait_for(there, "every node has an agent", limit_s=READY_S)
    return {name: pid for name, pid in found.items() if pid is not None}


def of_rays(machine: Machine, word: str) -> int:
    """Return the process of a machine's Ray with this in its name or command line."""
    return next(pid for pid, line in machine.processes().items() if word in line)


def variables(pid: int) -> list[str]:
    """Return the names of a process's variables."""
    return [line.partition("=")[0] for line in Path(f"/proc/{pid}/environ").read_text("utf-8").split("\0") if line]


@pytest.mark.spot
def test_what_is_given_back_is_reserved_again_soon(made: Callable[[], RayEngine]) -> None:
    engine, took_ms = made(), []
    for number in range(6):
        gang = Gang(id=f"r:{number}", shares=(Share(node="n1", gpu_type="H100", count=4),))
        began = time.monotonic()
        wait_for(partial(is_placed, engine, gang), "it is reserved")
        took_ms.append(round((time.monotonic() - began) * 1000))
        engine.release(gang.id)
    print(f"reserved: {took_ms[0]} ms, again {took_ms[1:]} ms")


def test_an_agent_is_no_process_of_rays(ray: Cluster, made: Callable[[], RayEngine]) -> None:
    made()
    for name, pid in agents(ray).items():
        assert not [word for word in variables(pid) if word.startswith("RAY_")]
        machine = ray.nodes[name]
        raylet = of_rays(machine, "/raylet/raylet")
        assert pid not in linux.descendants(raylet)
        ours = Path(f"/proc/{os.getpid()}/oom_score_adj").read_text(encoding="ascii")
        assert Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii") == ours
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_an_agent_that_is_killed_is_started_again(
    ray: Cluster, made: Callable[[], RayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "AGENT_LOOK_EVERY_S", 0.5)
    engine = made()
    before = agents(ray)
    os.kill(before["n3"], signal.SIGKILL)
    wait_for(lambda: ray.nodes["n3"].uplink() is None, "it is gone")
    assert agents(ray)["n3"] != before["n3"]
    engine.events()
    assert len(engine.nodes()) == 3


def test_an_actor_that_is_killed_takes_no_agent_with_it(
    ray: Cluster, made: Callable[[], RayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "AGENT_LOOK_EVERY_S", 0.5)
    engine = made()
    before = agents(ray)
    engine.events()
    machine = ray.nodes["n2"]
    first = of_rays(machine, "ray::NodeActor")
    os.kill(first, signal.SIGKILL)

    def another() -> bool:
        return any("ray::NodeActor" in line and pid != first for pid, line in machine.processes().items())

    wait_for(another, "there is another actor", limit_s=READY_S)
    assert agents(ray) == before
    assert engine.events() == []


def test_a_head_that_is_killed_ends_nothing_and_its_successor_is_told_what_there_is(
    ray: Cluster, made: Callable[..., RayEngine], tmp_path: Path
) -> None:
    engine = made()
    before = agents(ray)
    kept = Gang(id="r:1", shares=(Share(node="n1", gpu_type="H100", count=4),))
    assert ask(engine, kept) == Placed(gang=kept)
    engine.events()
    ray.head.kill()
    other = Gang(id="r:2", shares=(Share(node="n2", gpu_type="H100", count=1),))
    sentence = f"the Ray head at {ray.address} does not answer; running attempts continue"
    wait_for(lambda: ask(engine, other) == Waiting(sentence=sentence), "the head is missed", limit_s=30)
    assert (ask(engine, kept), engine.recover()) == (Placed(gang=kept), ["r:1"])
    assert [node.name for node in engine.nodes()] == ["n1", "n2", "n3"]
    assert agents(ray) == before
    for machine in ray.nodes.values():  # as `sgpu join` does when its raylet ends
        machine.kill()
    ray.start()
    wait_for(lambda: ask(engine, other) == Placed(gang=other), "the head is back", limit_s=READY_S)
    assert agents(ray) == before
    assert engine.events() == []
    knows_nothing = made(tmp_path / "another")
    wait_for(lambda: knows_nothing.recover() == ["r:1", "r:2"], "what ran is reserved again", limit_s=READY_S)
