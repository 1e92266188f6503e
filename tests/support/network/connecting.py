"""A process in a network namespace that listens and connects with uids of others, as a test asks it.

listen UID ADDRESS PORT     ─▶ port         of a process of its own, which accepts and says "hi"
connect UID ADDRESS PORT    ─▶ reached, or the name of the error
send UID ADDRESS PORT       ─▶ sent, or the name of the error: a datagram
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.support.network.namespaces import entering

_CONNECT_S = 5.0
_FAST_OPEN = 0x20000000


class Connector:
    """The test's end of the process."""

    def __init__(self, namespace: str) -> None:
        program = [*entering(namespace), sys.executable, "-c", _program()]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Connector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def listen(self, uid: int, address: str, port: int = 0) -> int:
        """Listen as a uid; return the port."""
        return int(self._ask("listen", uid, address, port))

    def connect(self, uid: int, address: str, port: int) -> str:
        """Connect as a uid."""
        return self._ask("connect", uid, address, port)

    def connect_from(self, source: int, uid: int, address: str, port: int) -> str:
        """Connect as a uid from a port, which another connection may have had."""
        return self._ask("connect", uid, address, port, source)

    def send(self, uid: int, address: str, port: int) -> str:
        """Send a datagram as a uid."""
        return self._ask("send", uid, address, port)

    def send_at_once(self, uid: int, address: str, port: int) -> str:
        """Connect as a uid with data in the first packet."""
        return self._ask("fast", uid, address, port)

    def _ask(self, *words: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


def _program() -> str:
    return f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); from {__name__} import main; main()"


def main() -> None:
    """Answer lines until the end of the input, then end the listeners."""
    listeners: list[int] = []
    try:
        for line in sys.stdin:
            verb, uid, address, port, *source = line.split()
            works: dict[str, Callable[[Place, int], object]] = {
                "listen": _listen,
                "connect": _connect,
                "send": _send,
                "fast": _send_at_once,
            }
            pid, said = _as_uid(int(uid), works[verb], (address, int(port)), int(source[0]) if source else 0)
            if verb == "listen":
                listeners.append(pid)
            else:
                os.waitpid(pid, 0)
            print(said, flush=True)
    finally:
        for pid in listeners:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


Place = tuple[str, int]


def _as_uid(uid: int, work: Callable[[Place, int], object], place: Place, source: int) -> tuple[int, str]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        try:
            said = work(place, source)
        except OSError as error:
            said = errno.errorcode.get(error.errno or 0, repr(error))
        if isinstance(said, socket.socket):
            os.write(write, f"{said.getsockname()[1]}".encode())
            os.close(write)
            while True:
                with contextlib.suppress(OSError), said.accept()[0] as peer:
                    peer.sendall(b"hi")
        os.write(write, f"{said}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        return pid, answer.read()


def _family(place: Place) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in place[0] else socket.AF_INET


def _listen(place: Place, source: int) -> socket.socket:
    return socket.create_server(place, family=_family(place), backlog=64)


def _connect(place: Place, source: int) -> str:
    with socket.socket(_family(place)) as sock:
        sock.settimeout(_CONNECT_S)
        if source:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((place[0], source))
        sock.connect(place)
        return "reached" if sock.recv(2) == b"hi" else "closed"


def _send(place: Place, source: int) -> str:
    with socket.socket(_family(place), socket.SOCK_DGRAM) as sock:
        sock.connect(place)
        sock.send(b"hi")
        return "sent"


def _send_at_once(place: Place, source: int) -> str:
    with socket.socket(_family(place)) as sock:
        # With a timeout in Python, the socket would not block.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", round(_CONNECT_S), 0))
        sock.sendto(b"hi", _FAST_OPEN, place)
        return "reached" if sock.recv(2) == b"hi" else "closed"
