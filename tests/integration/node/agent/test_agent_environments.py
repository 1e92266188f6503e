"""The agent keeps restored environments, and has the restoring process look at them from time to time."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.environment.restore.cache.unit_integrity import LOOK_S
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import DirectoryStore
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.node.agent.environments import EnvironmentWaiter, RestoredEnvironment, RestoredEnvironments
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import EnvironmentRequest
from serverless_gpu.testing import FakeClock
from tests.support.environment.made_environments import Made
from tests.support.environment.restored_process import CANNOT_MOUNT

WAIT_S = 30.0


class Agent:
    """What an agent has of its environments, and its loop."""

    def __init__(self, root: Path) -> None:
        self.clock = FakeClock()
        self.selector = selectors.DefaultSelector()
        self.log = os.open(root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.environments = RestoredEnvironments(
            Home(root), self.log, dict(os.environ), self.selector, lambda: False, clock=self.clock
        )
        self.ready: list[RestoredEnvironment] = []

    def ask(self, wanted: EnvironmentRequest) -> bool:
        """Ask for an environment; return whether it was there at once, else wait for it."""
        count = len(self.ready)

        def failed(reason: Reason, message: str) -> None:
            raise AssertionError((reason, message))

        waiter = EnvironmentWaiter(ready=lambda one, _: self.ready.append(one), failed=failed, told=lambda _: None)
        self.environments.have(wanted, {}, waiter, lambda _: True)
        if len(self.ready) > count:
            return True
        deadline = time.monotonic() + WAIT_S
        while len(self.ready) == count:
            assert time.monotonic() < deadline, "it was not restored in time"
            for key, _ in self.selector.select(1.0):
                key.data()
        return False

    def close(self) -> None:
        process = self.environments._process
        self.environments._close()  # the process ends with its channel
        if process is not None:
            process.wait(WAIT_S)
        self.selector.close()
        os.close(self.log)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.close()


@pytest.mark.skipif(bool(CANNOT_MOUNT), reason=f"no mounts here: {CANNOT_MOUNT}")
def test_22A7_the_agent_has_a_mounted_environment_looked_at_every_ten_minutes(agent: Agent, tmp_path: Path) -> None:
    snapshot = Made(StoreBlobs(DirectoryStore(tmp_path / "store"))).simple("alpha")
    wanted = EnvironmentRequest(snapshot=snapshot.address, store=str(tmp_path / "store"), mode="overlay")
    assert [agent.ask(wanted) for _ in range(3)] == [False, True, True]
    agent.clock.advance(LOOK_S - 1)
    assert agent.ask(wanted)
    agent.clock.advance(1)
    assert [agent.ask(wanted) for _ in range(2)] == [False, True]
    assert len(set(map(id, agent.ready))) == 1, "nothing was changed: it is the same one, and interpreters stay"
