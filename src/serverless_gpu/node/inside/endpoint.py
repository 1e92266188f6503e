"""The end of a connection into an attempt: a process with the rights and devices of the ranks.

    user ◀── tunnel ──▶ uplink ── socket pair ──▶ endpoint ──▶ port     a TCP port on loopback (`sgpu forward`)
                          or a local client                 ├▶ socket   a Unix socket in the attempt's work directory
                                                            └▶ program  a new process (`sgpu exec`, `terminal.py`)

The supervisor asks the stem for an endpoint. The stem forks the endpoint into the attempt's cgroup and namespaces, with
the environment variables of the node's first rank. The stem ends the endpoint with the attempt.

The endpoint first writes one line: ``+`` after it has connected, or ``-`` and the reason. The endpoint then copies
bytes in both directions. Each end may close its direction before the other.

Failure cases: If either side closes its socket, the endpoint sends the remaining bytes and ends. If a reader is slow,
the endpoint stops reading from the other side.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket

from . import linux, protocol
from .terminal import TerminalHost

_CONNECT_S = 10.0
_PIECE_BYTES = 256 << 10
_LOOPBACK = ("127.0.0.1", "::1")


def main(request: protocol.Message, sock: socket.socket) -> int:
    """Serve one connection until it ends. Return the exit code of the process."""
    linux.set_name("sgpu-endpoint")
    environment = request.get("env")
    os.environ.clear()
    os.environ.update(environment if isinstance(environment, dict) else {})
    target = request.get("target")
    assert isinstance(target, dict)
    try:
        match target.get("kind"):
            case "port":
                other = _connect_port(protocol.integer(target, "port"))
            case "socket":
                other = _connect_socket(protocol.text(request, "work"), protocol.text(target, "name"))
            case _:
                return _run(request, target, sock)
    except (OSError, ValueError) as error:
        _refuse(sock, str(error) if isinstance(error, ValueError) else error.strerror or str(error))
        return 1
    sock.sendall(b"+\n")
    relay(sock, other)
    return 0


def _refuse(sock: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(b"-" + why.replace("\n", " ").encode("utf-8", "replace")[:1_000] + b"\n")
    sock.close()


def _connect_port(port: int) -> socket.socket:
    error: OSError | None = None
    for address in _LOOPBACK:
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_S)
        except OSError as refused:
            error = error or refused
    assert error is not None
    raise ValueError(f"no process of the run listens on port {port} of loopback ({error.strerror or error})")


def _connect_socket(work: str, name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.chdir(work)  # The path of a Unix socket has at most 107 bytes.
        sock.connect(name)
    except OSError as error:
        sock.close()
        raise ValueError(f"the run has no open socket {name!r} ({error.strerror})") from None
    return sock


def _run(request: protocol.Message, target: protocol.Message, sock: socket.socket) -> int:
    work = protocol.text(request, "cwd")
    try:
        os.chdir(work)
    except OSError:
        os.chdir(protocol.text(request, "work") or "/")  # A sandbox does not show the caller's directory.
    if isinstance(term := target.get("term"), str) and term:
        os.environ["TERM"] = term
    argv = protocol.strings(target, "argv") or [os.environ.get("SHELL") or "/bin/sh"]
    size = (protocol.integer(target, "rows"), protocol.integer(target, "columns"))
    try:
        host = TerminalHost(argv, tty=target.get("tty") is True, size=size)
    except OSError as error:
        _refuse(sock, f"{argv[0]!r} cannot be run: {error.strerror}")
        return 1
    sock.sendall(b"+\n")
    host.add(sock)
    host.serve()
    return 0


def relay(left: socket.socket, right: socket.socket) -> None:
    """Copy bytes between two sockets until both directions have ended, and close the sockets."""
    waiting = {left: b"", right: b""}  # Bytes for the other socket, by the socket that sent them.
    open_ends = {left, right}
    other = {left: right, right: left}
    for sock in (left, right):
        sock.setblocking(False)
    with contextlib.suppress(OSError), left, right:
        while open_ends or any(waiting.values()):
            poll = select.poll()
            for sock in (left, right):
                events = (select.POLLIN if sock in open_ends and not waiting[sock] else 0) | (
                    select.POLLOUT if waiting[other[sock]] else 0
                )
                if events:
                    poll.register(sock, events)
            ready = {fd for fd, _ in poll.poll()}
            for sock in (left, right):
                if sock.fileno() not in ready:
                    continue
                if waiting[other[sock]]:
                    with contextlib.suppress(BlockingIOError):
                        waiting[other[sock]] = waiting[other[sock]][sock.send(waiting[other[sock]]) :]
                if sock in open_ends and not waiting[sock]:
                    with contextlib.suppress(BlockingIOError):
                        waiting[sock] = sock.recv(_PIECE_BYTES)
                        if not waiting[sock]:
                            open_ends.discard(sock)
                            other[sock].shutdown(socket.SHUT_WR)
