"""A way to a server that can be cut: what comes then is accepted and never answered."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import threading
from collections.abc import Iterator

_BYTES = 65536


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Pass bytes on in both directions, until one side closes or the way is cut."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.server.target)) as behind:
            other = {self.request: behind, behind: self.request}
            while not self.server.closing.is_set():
                for ready in select.select(list(other), [], [], 0.05)[0]:
                    data = ready.recv(_BYTES)
                    if not data:
                        return
                    if not self.server.cut.is_set():
                        other[ready].sendall(data)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.cut = threading.Event()
        self.closing = threading.Event()


@contextlib.contextmanager
def way_to(uri: str) -> Iterator[tuple[str, threading.Event]]:
    """Yield another URI of a server, and what cuts the way there."""
    server = _Server(int(uri.rpartition(":")[2]))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.cut
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
