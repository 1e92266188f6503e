"""Runs that wait for an interpreter which is given up: each gets another one, in its own environment."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.node.agent.zygote_policy import ZYGOTES_MAX
from serverless_gpu.node.agent.zygote_pool import PRELOAD_S, ZygotePool
from serverless_gpu.node.agent.zygotes import Zygote, ZygoteRequest
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import Context
from serverless_gpu.node.processes.process_tree import CgroupRoot
from serverless_gpu.node.spawner.verbs import RootSpawner
from serverless_gpu.testing import FakeClock
from tests.support.node.restored import caller, environment


class Recorded(ZygotePool):
    """A pool that knows all zygotes it ever had."""

    def __init__(self, directory: Path, log: int) -> None:
        self.clock = FakeClock()
        super().__init__(
            Home(directory), log, CgroupRoot(None), selectors.DefaultSelector(), self.clock, RootSpawner({})
        )
        self.all: list[Zygote] = []

    def _spawn(self, *arguments: Any) -> Zygote:
        zygote = super()._spawn(*arguments)
        self.all.append(zygote)
        return zygote


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Recorded]:
    """Yield a pool whose interpreters start, and say nothing."""
    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT, 0o600)
    made = Recorded(tmp_path, log)
    yield made
    made.close()
    for zygote in made.all:
        zygote.process.kill()
        assert isinstance(zygote.process, subprocess.Popen)
        zygote.process.wait()
    os.close(log)


def silent(directory: Path, name: str = "python") -> Context:
    python = directory / name
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o700)
    return caller(directory, python=str(python), environ={"PATH": os.environ["PATH"]})


def test_a_run_starts_over_in_the_environment_it_waits_for(pool: Recorded, tmp_path: Path) -> None:
    first = environment(tmp_path, "links")
    second = environment(tmp_path, "links", prefix="/other")
    problems: list[str] = []
    context = silent(tmp_path)
    request = ZygoteRequest(context, first)
    pool.give_stem(request, 1, lambda stem, fd: None, problems.append)
    (zygote,) = pool.all
    zygote.move(second)  # for another run
    pool.clock.advance(PRELOAD_S + 1)
    pool.tend(())

    _, fresh = pool.all
    assert fresh.environment is first and fresh.waited_for
    assert not problems


def test_a_run_that_waits_is_not_forgotten_when_its_zygote_has_to_go(pool: Recorded, tmp_path: Path) -> None:
    for number in range(ZYGOTES_MAX + 1):
        request = ZygoteRequest(silent(tmp_path, f"python{number}"))
        pool.give_stem(request, 1, lambda stem, fd: None, lambda problem: None)

    *_, fresh, _ = pool.all
    assert fresh.context.python.endswith("python0") and fresh.waited_for
