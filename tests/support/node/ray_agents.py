"""What answers like the agent of a Ray node: a real text, recorded of Ray 2.60, or whatever a test has in its place."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded" / "ray-2.60.0-metrics.txt"
"""Of a node with 3 CPUs and 2 GPUs: an idle actor that has one of them, a task that runs, two that wait, objects that
were spilled. Most of the text's buckets are left out, and the session's name."""


def answer(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    """Return the whole answer of a server."""
    return "\r\n".join([f"HTTP/1.0 {status}", *fields, "", ""]).encode() + body


class Agent:
    """A server on loopback that gives one answer to everybody, piece by piece.

    Attributes:
        port: where it listens.
        pieces: of the answer.
        asked: what was asked, each time.
        hang: whether it says nothing more after the last piece, and does not close, until `close`.
    """

    def __init__(self, *pieces: bytes, hang: bool = False) -> None:
        self.pieces = pieces
        self.hang = hang
        self.asked: list[bytes] = []
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                self.asked.append(sock.recv(4096))
                for piece in self.pieces:
                    sock.sendall(piece)
                if self.hang:
                    self._over.wait()


@contextlib.contextmanager
def agent(*pieces: bytes, hang: bool = False) -> Iterator[Agent]:
    """Yield a server that gives this answer."""
    running = Agent(*pieces, hang=hang)
    try:
        yield running
    finally:
        running.close()
