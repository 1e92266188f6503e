"""Homes with a server: a scripted one for what the line may do, the real one for everything else."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.client.remote.profile import ServerProfile, find_profile, write_profile
from serverless_gpu.client.remote.server import close_all
from serverless_gpu.node.attempt.history import REMOTE_FILE
from serverless_gpu.node.attempt.server_attempt_record import read_remote
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.start_stop import stop_all
from serverless_gpu.testing import stop_agent
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import PoolRequest, PoolView
from tests.e2e.conftest import FAKES
from tests.support.homes import use_home
from tests.support.leftovers import nothing_left
from tests.support.local.observe import cancel_all, nothing_of_a_run, processes_of, wait_for
from tests.support.remote.fake_server import TOKEN, FakeServer
from tests.support.remote.server_process import ServerProcess


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Require that no process, port or directory of these tests is left at the end of the session."""
    with nothing_left():
        yield


@pytest.fixture(autouse=True)
def no_connections_left() -> Iterator[None]:
    """Close the connections of this process after each test: the next one has another server."""
    yield
    close_all()


@pytest.fixture
def fake(home: Path) -> Iterator[FakeServer]:
    """Yield a scripted server that this home's remote calls go to, as on a machine with `sgpu up`."""
    with FakeServer() as server:
        write_profile(home, ServerProfile(url=server.url, token=TOKEN, principal="alice", embedded=True))
        yield server


@pytest.fixture(scope="session")
def served_home() -> Iterator[Path]:
    """Yield the home of a real server and its node, for all tests that leave both as they were."""
    directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    with _variables(directory):
        server = ServerProcess(directory)
        server.start()
    profile = find_profile(directory, {})
    with contextlib.closing(Connection(profile.url, profile.token)) as admin:  # some tests run as two users
        admin.ask("PUT", "/pools/default", PoolRequest(isolation="none"), answer=PoolView)
    yield directory
    server.kill(signal.SIGTERM)
    end_node(directory)
    shutil.rmtree(directory)


@pytest.fixture
def served(served_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a home with a real server and eight declared GPUs; require that no run outlives the test."""
    use_home(monkeypatch, served_home, FAKES, preload="")
    wait_for(lambda: not unsettled(served_home), "the server has heard all of the tests before", limit_s=60)
    yield served_home
    try:
        wait_for(lambda: nothing_of_a_run(served_home), "every run of the test has ended", limit_s=60)
    finally:
        cancel_all(served_home)


@pytest.fixture
def own_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """Yield a server of this test's home, for tests that kill it."""
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", FAKES)
    server = ServerProcess(home)
    server.start()
    try:
        yield server
    finally:
        cancel_all(home)
        server.kill(signal.SIGTERM)
        end_node(home)


@contextlib.contextmanager
def _variables(home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_home(monkeypatch, home, FAKES, preload="")
        yield


def unsettled(home: Path) -> list[Path]:
    """Return the attempts of which a server has still to hear something: its uplink writes there, then."""
    known = [(path.parent, read_remote(path.parent)) for path in home.glob(f"runs/*/*/{REMOTE_FILE}")]
    return [directory for directory, remote in known if remote is not None and remote.standing == "open"]


def end_node(home: Path) -> None:
    """End the uplink and the agent of a home, and wait until nothing of it runs."""
    stop_all(Home(home))
    stop_agent(home)
    wait_for(lambda: not processes_of(home), "no process of the home is left")
