"""The engine of the server's own machine: the suite, and an uplink that is kept running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu.engines.base import NodeLost, NodeUp, Share
from serverless_gpu.engines.local import LocalEngine
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile, read_profile
from serverless_gpu.testing.engines import EngineConformance, Losing, Shares
from tests.support.local.observe import processes_of, wait_for

PROFILE = UplinkProfile(url="http://127.0.0.1:9", token="none", name="here")  # nobody answers on the discard port


def refuse(*_: object) -> bool:
    raise AgentUnavailable("the uplink of this node could not be started: no processes left")


@pytest.fixture
def made(home: Path) -> Iterator[Callable[[], LocalEngine]]:
    """Yield what makes an engine of a home of its own; its uplink is ended with the test."""
    place = Home(home)
    yield lambda: LocalEngine(place, home / "server", profile=PROFILE, environ=os.environ)
    # An uplink that has just started does not hold its lock yet, so `stop_all` may have to look again.
    wait_for(lambda: not start_stop.stop_all(place) and not processes_of(home), "no uplink of the home is left")


class TestLocalEngine(EngineConformance):
    """The suite."""

    @pytest.fixture
    def engine(self, made: Callable[[], LocalEngine]) -> LocalEngine:
        """Return an engine with nothing placed."""
        return made()

    @pytest.fixture
    def restarted(self, made: Callable[[], LocalEngine]) -> Callable[[], LocalEngine]:
        """Return what makes the next one."""
        return made

    @pytest.fixture
    def shares(self) -> Shares:
        """Return a gang."""
        return (Share(node="here", gpu_type="CPU", count=1),)

    @pytest.fixture
    def losing(self, monkeypatch: pytest.MonkeyPatch, shares: Shares) -> Losing | None:
        """Return this machine, which may have no room for an uplink."""
        ensure = start_stop.ensure
        return Losing(
            shares,
            lambda: monkeypatch.setattr(start_stop, "ensure", refuse),
            lambda: monkeypatch.setattr(start_stop, "ensure", ensure),
        )


def uplink(home: Path) -> int:
    """Return the process that holds the uplink's lock, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = start_stop.running(Home(home), home / "server" / "node.json")
        if found is not None:
            return found.pid
        time.sleep(0.02)
    raise AssertionError("no uplink is running")


def test_an_uplink_that_is_killed_is_started_again(made: Callable[[], LocalEngine], home: Path) -> None:
    engine = made()
    engine.events()
    first = uplink(home)
    engine.close()
    made().events()
    assert uplink(home) == first
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while start_stop.running(Home(home), home / "server" / "node.json") is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    made().events()
    assert uplink(home) != first


def test_the_profile_says_how_the_server_is_reached_now(made: Callable[[], LocalEngine], home: Path) -> None:
    made()
    assert read_profile(home / "server" / "node.json") == PROFILE
    assert (home / "server" / "node.json").stat().st_mode & 0o777 == 0o600


def test_a_machine_that_cannot_start_an_uplink_is_lost_and_found(
    made: Callable[[], LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made()
    with monkeypatch.context() as patch:
        patch.setattr(start_stop, "ensure", refuse)
        (lost,) = engine.events()
        assert lost == NodeLost(node="here", sentence="the uplink of this node could not be started: no processes left")
        assert engine.events() == []
        assert engine.nodes() == []
    assert [type(event) for event in engine.events()] == [NodeUp]
    assert len(engine.nodes()) == 1
