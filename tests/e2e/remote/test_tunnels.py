"""Connections into runs of a server: through the server and the uplink, also when both are killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu import distributed
from serverless_gpu.ambient import new_run_id
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.client.runs.endpoint import open_endpoint
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import AlreadyFinished, EndpointRefused, NotAllowed, ServerlessGpuError
from serverless_gpu.model.endpoint import EndpointTarget, PortTarget, ProgramTarget, SocketTarget
from serverless_gpu.model.tunnel_end import TunnelMessage
from serverless_gpu.node.base.home import Home, find_home
from serverless_gpu.node.inside import terminal_frames as frames
from serverless_gpu.wire.access import PrincipalRequest, TokenMade
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.tunnels import SentMessage, TunnelRequest, TunnelView
from tests.support.local.observe import Process, wait_for
from tests.support.remote.server_process import ServerProcess

BYTES = 6 << 20


def echo_until(where: str) -> None:
    """Echo every byte on a loopback port until a file appears."""
    server = socket.create_server(("127.0.0.1", 0))
    Path(where, "port.tmp").write_text(str(server.getsockname()[1]))
    Path(where, "port.tmp").rename(Path(where, "port"))

    def serve(sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(1 << 16):
                sock.sendall(data)

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    while not Path(where, "go").exists():
        time.sleep(0.05)


@pytest.fixture
def going(served: Path, tmp_path: Path) -> Iterator[Run[None]]:
    run = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True)(echo_until).submit(str(tmp_path))
    wait_for((tmp_path / "port").exists, "the function listens")
    wait_for(lambda: run.status() == "RUNNING", "the server knows that the run is going on")
    yield run
    (tmp_path / "go").touch()
    with contextlib.suppress(ServerlessGpuError):
        run.results(60)


def connect(run: Run[Any], target: EndpointTarget) -> socket.socket:
    sock = open_endpoint(find_home(os.environ), run.id, target)
    sock.settimeout(60)
    return sock


def port_of(where: Path) -> PortTarget:
    return PortTarget(port=int((where / "port").read_text()))


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := sock.recv(1 << 16)):
        data += piece
    return bytes(data)


def test_29_a_port_of_a_run_is_reached_and_every_byte_comes_back_once(going: Run[None], tmp_path: Path) -> None:
    sent = os.urandom(BYTES)
    with connect(going, port_of(tmp_path)) as first, connect(going, port_of(tmp_path)) as second:
        second.sendall(b"second")
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                first.sendall(sent)
            os._exit(0)
        came = read_exactly(first, BYTES)
        os.waitpid(pid, 0)
        assert hashlib.sha256(came).digest() == hashlib.sha256(sent).digest()
        assert read_exactly(second, 6) == b"second"
        first.shutdown(socket.SHUT_WR)
        assert first.recv(1) == b"", "the end of one direction arrives"


def test_29_a_program_beside_a_run_has_its_devices_and_its_exit_status_arrives(going: Run[None]) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES; cat; echo problem >&2; exit 3"
    with connect(going, ProgramTarget(argv=("sh", "-c", script))) as sock:
        sock.sendall(frames.encode(frames.INPUT, b"input\n") + frames.encode(frames.END))
        reader, found = frames.FrameReader(), {frames.OUTPUT: b"", frames.ERRORS: b"", frames.EXIT: b""}
        while data := sock.recv(1 << 16):
            for kind, payload in reader.feed(data):
                found[kind] += payload
    assert found[frames.OUTPUT] == b"0\ninput\n" and found[frames.ERRORS] == b"problem\n"
    assert frames.status_of(found[frames.EXIT]) == 3


@pytest.mark.parametrize("target", [PortTarget(port=1), SocketTarget(name="kernel"), ProgramTarget(argv=("none",))])
def test_29_a_target_that_is_not_there_is_refused_with_a_reason(going: Run[None], target: EndpointTarget) -> None:
    with pytest.raises(EndpointRefused):
        connect(going, target)


def test_29_nobody_but_the_owner_connects(going: Run[None], served: Path, tmp_path: Path) -> None:
    profile = find_profile(served, {})
    path = f"/runs/{going.id}/tunnels/{new_run_id()}"
    with contextlib.closing(Connection(profile.url, profile.token)) as admin:
        made = admin.ask("POST", "/users", PrincipalRequest(name="mallory", role="admin"), answer=TokenMade)
        opened = admin.ask("PUT", path, TunnelRequest(), answer=TunnelView)
    assert opened.fence == 1
    with contextlib.closing(Connection(profile.url, made.secret)) as other:
        with pytest.raises(NotAllowed):
            other.ask("PUT", f"/runs/{going.id}/tunnels/{new_run_id()}", TunnelRequest(), answer=TunnelView)
        for method, rest in (("PUT", ""), ("POST", "/messages"), ("DELETE", "")):
            body = {"PUT": TunnelRequest(), "POST": SentMessage(message=TunnelMessage())}.get(method)
            with pytest.raises(ServerlessGpuError):
                other.ask(method, path + rest, body, answer=object)
        with pytest.raises(ServerlessGpuError):
            list(other.stream("GET", f"{path}/messages", answer=TunnelMessage))


def test_29_a_run_that_has_ended_refuses_connections(served: Path) -> None:
    run = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True)(len).submit("")
    run.results(60)
    with pytest.raises(AlreadyFinished):
        connect(run, SocketTarget(name="terminal"))


def test_29_a_connection_survives_the_death_of_the_server(
    own_server: ServerProcess, home: Path, tmp_path: Path
) -> None:
    run = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True)(echo_until).submit(str(tmp_path))
    wait_for((tmp_path / "port").exists, "the function listens")
    wait_for(lambda: run.status() == "RUNNING", "the server knows that the run is going on")
    with connect(run, port_of(tmp_path)) as sock:
        sock.sendall(b"before")
        assert read_exactly(sock, 6) == b"before"
        own_server.kill()
        sock.sendall(b"while it is dead")
        own_server.start()
        assert read_exactly(sock, 16) == b"while it is dead"
        sock.sendall(b"after")
        assert read_exactly(sock, 5) == b"after"
    (tmp_path / "go").touch()
    run.results(60)


def test_29_a_connection_ends_with_the_uplink_and_the_next_one_works(
    own_server: ServerProcess, home: Path, tmp_path: Path
) -> None:
    run = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True)(echo_until).submit(str(tmp_path))
    wait_for((tmp_path / "port").exists, "the function listens")
    wait_for(lambda: run.status() == "RUNNING", "the server knows that the run is going on")
    with connect(run, port_of(tmp_path)) as sock:
        sock.sendall(b"before")
        assert read_exactly(sock, 6) == b"before"
        uplink(home).kill()
        assert sock.recv(1) == b""
    with connect(run, port_of(tmp_path)) as sock:
        sock.sendall(b"after")
        assert read_exactly(sock, 5) == b"after"
    (tmp_path / "go").touch()
    run.results(60)


def uplink(home: Path) -> Process:
    """Return the uplink of a home, whose lock names it."""
    [path] = Home(home).sockets().glob("uplink-*.lock")
    return Process(int(path.read_text().split()[0]))
