"""Connects to a port, a socket or a new program in a running attempt.

    open_endpoint(run, target) ──▶ the run's supervisor on this machine, which gets one end of a socket pair
                               └─▶ the server: a stream of a tunnel (`remote/tunnels.py`)

Both ways return a connected socket, so that callers do not distinguish local runs from remote runs.
"""

from __future__ import annotations

import contextlib
import os
import socket

from serverless_gpu.client.runs.attachment import find_supervisor
from serverless_gpu.errors import AgentUnavailable, EndpointRefused
from serverless_gpu.lazy_import import load
from serverless_gpu.model.endpoint import EndpointTarget
from serverless_gpu.node.attempt.history import REMOTE_FILE, read_run
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home

LINE_BYTES_MAX = 2_000
_ANSWER_S = 30.0


def open_endpoint(home: Home, run_id: str, target: EndpointTarget) -> socket.socket:
    """Return a socket that is connected to a target in a running attempt.

    The run is on this machine or on the server.

    Raises:
        AgentUnavailable: no supervisor of the run answers.
        EndpointRefused: the run refuses the connection, for example because no process listens on a port.
        ServerlessGpuError: the server refuses the connection, or does not answer.
    """
    record = read_run(home.runs, run_id)
    if not record.problem and not (record.directory / REMOTE_FILE).exists():
        return open_local_endpoint(home, run_id, target)
    remote = load("serverless_gpu.client.remote.tunnels")
    sock: socket.socket = remote.open_remote_endpoint(home, run_id, target, os.environ)
    return _connected(sock, run_id)


def open_local_endpoint(home: Home, run_id: str, target: EndpointTarget) -> socket.socket:
    """Return a socket that is connected to a target in a run of this machine.

    Raises:
        AgentUnavailable: no supervisor of the run answers.
        EndpointRefused: the run refuses the connection, for example because no process listens on a port.
    """
    record = read_run(home.runs, run_id)
    channel = find_supervisor(home, run_id, record.directory)
    if channel is None:
        raise AgentUnavailable(f"run {run_id} has ended", hint=f"show the run with `sgpu show {run_id}`")
    ours, theirs = socket.socketpair()
    with contextlib.closing(channel), theirs:
        try:
            protocol.send(channel, protocol.OpenEndpoint(target=target), (theirs.fileno(),))
        except OSError as error:
            ours.close()
            raise AgentUnavailable(f"the supervisor of run {run_id} does not answer: {error.strerror}") from None
    return _connected(ours, run_id)


def _connected(sock: socket.socket, run_id: str) -> socket.socket:
    try:
        _await_target(sock, run_id)
    except BaseException:
        sock.close()
        raise
    return sock


def _await_target(sock: socket.socket, run_id: str) -> None:
    """Wait for the first line of a connection. Raises EndpointRefused if the target is not connected."""
    sock.settimeout(_ANSWER_S)
    line = bytearray()
    try:
        while not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
            piece = sock.recv(1)  # The bytes after the line belong to the target.
            if not piece:
                break
            line += piece
    except TimeoutError:
        line = bytearray(f"-no answer after {_ANSWER_S:.0f} s".encode())
    if line[:1] != b"+":
        why = line[1:].decode("utf-8", "replace").strip() or "the run ended"
        raise EndpointRefused(f"cannot connect to run {run_id}: {why}")
    sock.settimeout(None)
