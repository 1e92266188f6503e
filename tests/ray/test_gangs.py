"""Gangs on several machines of a pool that real Ray keeps together; a person's commands, real nodes, real ranks."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu import attach
from serverless_gpu.client.remote.server import close_all
from serverless_gpu.client.run import Run
from tests.homes import use_home
from tests.local.small_environment import SmallEnvironment, with_requirements
from tests.ray.pools import Pool
from tests.remote import gang_work
from tests.remote.gang_work import add_up
from tests.remote.machines import SUBMIT

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(420)]

SITE = sysconfig.get_path("purelib")
RUN_S = 120.0


class Caller:
    """Somebody at the first machine, with a small environment of their own."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._small = SmallEnvironment(pool.first.home / "caller", *with_requirements("httpx2"))
        self._small.write("gang_work.py", Path(gang_work.__file__).read_text())
        self._small.write("submit.py", SUBMIT)

    def submit(self, function: Callable[..., object], *args: str, **options: object) -> Run[object]:
        """Submit a call of a function of `gang_work.py`; return its handle."""
        words = json.dumps({"grace": 2} | options)
        out, _ = self._small.run("submit.py", function.__name__, words, *args, **self.pool.first.environ)
        return attach(out.strip())


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Yield three machines."""
    with Pool("A10:2,L4:1") as made:
        made.join("two", "H100:8,A10:3,L4:1,T4:2")
        made.join("three", "H100:8,A10:3,L4:1,T4:2")
        yield made


@pytest.fixture
def caller(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    """Yield somebody at the first machine, whose home this process has, too."""
    use_home(monkeypatch, pool.first.home)
    monkeypatch.setenv("SERVERLESS_GPU_SOCKETS", pool.first.environ["SERVERLESS_GPU_SOCKETS"])
    yield Caller(pool)
    close_all()


def test_four_ranks_on_two_machines_add_up_over_gloo(caller: Caller) -> None:
    run = caller.submit(add_up, SITE, gpus=4, gpu_type="T4")
    assert run.results(RUN_S) == [(rank, 6, str(rank // 2)) for rank in range(4)]
