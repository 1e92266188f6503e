"""Gangs on several machines of a pool that a real Ray keeps together: a person's commands, real nodes, real ranks.

One pool serves all tests, in their order: the last ones restart its server, end its head, and lose a machine.
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu import attach
from serverless_gpu.client.remote.server import close_all
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import RunCancelled
from tests.e2e.ray.pools import START_S, Pool
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.local.observe import announced, wait_for
from tests.support.remote.gang_work import add_up, add_up_for_ever, place, stay
from tests.support.remote.submitting import Submitting

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(420)]

SITE = sysconfig.get_path("purelib")
RUN_S = 120.0
HEADLESS_S = 60.0
KNOWN_S = 60.0


class Caller:
    """Somebody at the first machine, with an environment of their own."""

    def __init__(self, pool: Pool) -> None:
        self._environ = pool.first.environ
        self._submitting = Submitting(pool.first.home / "caller")

    def submit(self, function: Callable[..., object], *args: str, gpus: int, **options: object) -> Run[object]:
        """Submit a call of a function of `gang_work.py`; return its handle."""
        options = {"gpus": gpus, "grace": 2} | options
        return attach(self._submitting.submit(function, *args, environ=self._environ, **options))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Yield three machines; of no type has one as many as the gangs here want."""
    with Pool("A10:2,L4:1") as made:
        made.join("two", "H100:8,A10:3,L4:1,T4:2")
        made.join("three", "H100:8,A10:3,L4:1,T4:2")
        yield made


@pytest.fixture(scope="module")
def made_caller(pool: Pool) -> Caller:
    return Caller(pool)


@pytest.fixture
def caller(pool: Pool, made_caller: Caller, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    """Yield somebody at the first machine, whose home this process has, too."""
    use_home(monkeypatch, pool.first.home)
    monkeypatch.setenv("SERVERLESS_GPU_SOCKETS", pool.first.environ["SERVERLESS_GPU_SOCKETS"])
    yield made_caller
    close_all()


def all_there(where: Path, ranks: int, fence: int = 1) -> None:
    """Wait until all ranks of an attempt have said that they are there."""
    for rank in range(ranks):
        announced(where, f"{fence}.rank{rank}")


def test_four_ranks_on_two_machines_add_up_over_gloo(caller: Caller) -> None:
    run = caller.submit(add_up, SITE, gpus=4, gpu_type="T4")
    assert run.results(RUN_S) == [(rank, 6, str(rank // 2)) for rank in range(4)]


@pytest.mark.parametrize(
    ("gpus", "gpu_type", "sizes"), [(16, "H100", [8, 8]), (8, "A10", [2, 3, 3]), (3, "L4", [1, 1, 1])]
)
def test_the_shape_of_a_gang_is_what_machines_have(caller: Caller, gpus: int, gpu_type: str, sizes: list[int]) -> None:
    found = caller.submit(place, gpus=gpus, gpu_type=gpu_type).results(RUN_S)
    assert isinstance(found, list)
    ranks, nodes, local, of_node, num_nodes, world = zip(*found, strict=True)
    assert (ranks, set(num_nodes), set(world)) == (tuple(range(gpus)), {len(sizes)}, {gpus})
    counts = Counter(nodes)
    assert (list(nodes), sorted(counts.values())) == (sorted(nodes), sizes)
    assert list(local) == [number for node in sorted(counts) for number in range(counts[node])]
    assert list(of_node) == [counts[node] for node in nodes]


def test_same_node_has_no_second_one_and_says_what_it_costs(caller: Caller) -> None:
    run = caller.submit(place, gpus=16, gpu_type="H100", same_node=True, wait=True)
    wait_for(lambda: golden("ray.gangs.without-same-node") in run.waiting_for(), "it says why it waits")
    assert golden("ray.gangs.needs-16-h100") in run.waiting_for()
    run.cancel()
    with pytest.raises(RunCancelled):
        run.results(RUN_S)


def test_a_restart_of_the_server_is_nothing_to_a_run(caller: Caller, pool: Pool, tmp_path: Path) -> None:
    run = caller.submit(stay, str(tmp_path), gpus=4, gpu_type="T4")
    all_there(tmp_path, 4)
    pool.down()
    pool.up()
    (tmp_path / "go").touch()
    assert run.results(RUN_S) == [0, 1, 2, 3]


def test_without_a_head_runs_go_on_and_others_wait_and_say_so(caller: Caller, pool: Pool, tmp_path: Path) -> None:
    run = caller.submit(stay, str(tmp_path), gpus=4, gpu_type="T4")
    all_there(tmp_path, 4)
    with pool.head_held_down():
        waits = caller.submit(place, gpus=16, gpu_type="H100")
        why = f"the Ray head at 127.0.0.2:{pool.first.port} does not answer; running attempts continue"
        wait_for(lambda: why in waits.last_sentence(), "it says so", limit_s=HEADLESS_S)
        (tmp_path / "go").touch()
        assert run.results(RUN_S) == [0, 1, 2, 3]
    found = waits.results(START_S)
    assert isinstance(found, list)
    assert len(found) == 16


def test_a_machine_that_is_gone_ends_the_run_and_the_caller_knows(caller: Caller, pool: Pool, tmp_path: Path) -> None:
    run = caller.submit(add_up_for_ever, SITE, str(tmp_path), gpus=4, gpu_type="T4")
    all_there(tmp_path, 4)
    pool.nodes["three"].lose()
    with pytest.raises(RuntimeError) as caught:  # a rank's own, whose sockets said it
        run.results(KNOWN_S)
    assert golden("ray.gangs.three-been-heard") in "\n".join(caught.value.__notes__)
