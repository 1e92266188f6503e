"""A TCP proxy in front of a server that keeps every byte which passes, in both directions."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class RecordingProxy:
    """A proxy on loopback.

    Args:
        port: of the server on loopback.

    Attributes:
        url: under which the server is reached through it.
        seen: what has passed.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self._open: set[socket.socket] = set()

    def __enter__(self) -> RecordingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._port))
                except OSError:  # the server is away
                    near.close()
                    continue
                self._open |= {near, far}
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
