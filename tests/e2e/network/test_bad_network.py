"""F20: a network that is slow and breaks half of all connections costs time, and nothing else.

client ─┐
        ├─▶ BadNetwork (5 s for an answer, half of all connections reset) ─▶ server
uplink ─┘
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.ambient import machine
from serverless_gpu.client.remote import profile as server_profile
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile, write_profile
from tests.e2e.remote.conftest import end_node
from tests.support.local.observe import wait_for
from tests.support.network.bad_network import BadNetwork
from tests.support.remote.server_process import ServerProcess

CALL = """
import sys, time
from serverless_gpu import distributed

@distributed(gpus=1, gpu_type="H100", remote=True)
def work(path):
    with open(path, "a") as file:
        file.write("ran\\n")
    time.sleep(2)
    print("half", flush=True)
    time.sleep(2)
    return "done"

if __name__ == "__main__":
    print(*work.distributed(sys.argv[1]), flush=True)
"""
DELAY_S, LOSS = 2.5, 0.5


class Echo:
    """A server that says back what it is told, and counts who asks."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._sock.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def close(self) -> None:
        """Listen no more."""
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    """Yield it."""
    server = Echo()
    yield server
    server.close()


def said_back(network: BadNetwork, data: bytes, *, limit_s: float = 10.0) -> bytes:
    """Return what comes back before the connection ends or the time is up."""
    port = int(network.url.rpartition(":")[2])
    back = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=limit_s) as sock:
        sock.sendall(data)
        while len(back) < len(data):
            piece = sock.recv(65536)
            if not piece:
                break
            back += piece
    return back


def test_what_gets_through_a_bad_network_is_whole_and_in_order(echo: Echo) -> None:
    data = os.urandom(300_000)
    with BadNetwork("127.0.0.1", echo.port, delay_s=0.01, seed=1) as network:
        assert said_back(network, data) == data
    assert (network.connections, network.resets) == (1, 0)


def test_half_of_all_connections_break_and_the_seed_says_which(echo: Echo) -> None:
    def broken() -> list[bool]:
        with BadNetwork("127.0.0.1", echo.port, loss=0.5, seed=7) as network:
            return [said_back(network, b"hello") != b"hello" for _ in range(40)]

    first = broken()
    assert 5 < sum(first) < 35
    assert broken() == first


def test_a_cable_that_is_pulled_closes_nothing(echo: Echo) -> None:
    with BadNetwork("127.0.0.1", echo.port) as network:
        network.half_open()
        assert said_back(network, b"hello", limit_s=0.2) == b""
        network.mend()
        assert said_back(network, b"hello") == b"hello"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_F20_a_slow_network_that_breaks_half_of_all_connections_loses_no_run(home: Path, tmp_path: Path) -> None:
    (home / "server.toml").write_text("node = false\n")  # this machine's node is far away
    server = ServerProcess(home)
    server.start()
    directory = home / "server"
    port = int((directory / "port").read_text())
    script, ran = tmp_path / "call.py", tmp_path / "ran"
    script.write_text(CALL)
    with BadNetwork("127.0.0.1", port, delay_s=DELAY_S / 2, loss=LOSS, seed=20) as network:
        try:
            token, node_token = (
                (directory / name).read_text(encoding="ascii").strip() for name in ("token", "node.token")
            )
            profile = directory / "far.json"
            write_profile(profile, UplinkProfile(url=network.url, token=node_token, name="far away"))
            start_stop.ensure(Home(home), profile, {**os.environ, "SERVERLESS_GPU_FAKE": "H100:1"})
            server_profile.write_profile(
                home, server_profile.ServerProfile(url=network.url, token=token, embedded=True, machine=machine())
            )
            words = [sys.executable, str(script), str(ran)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip().endswith("done") and ran.read_text() == "ran\n"
            assert network.resets >= 3, "nothing broke: this test has tried nothing"
            states = wait_for(lambda: ended(directory / "server.db"), "the run has ended", limit_s=60)
            assert "LOST" not in states and "UNREACHABLE" not in states
        finally:
            end_node(home)
            server.kill(signal.SIGTERM)


def ended(path: Path) -> list[str]:
    """Return the states of the one run, once it has ended."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        states = [state for (state,) in database.execute("SELECT state FROM events ORDER BY seq")]
    return states if states[-1:] == ["SUCCEEDED"] else []
