"""A real server for tests: its own process's worth of it in a thread, on loopback, with a home and a token of its own.

with served(home) as server:
    server.connection().ask("GET", "/version", answer=Version)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.server.core.settings import read_settings
from serverless_gpu.server.identity.uid_sharing import Exposure
from serverless_gpu.server.process import UvicornServer, serve
from serverless_gpu.wire.connection import Connection

STARTED_S = 60


class Served:
    """A server that answers.

    Attributes:
        url: its address.
        token: the administrator's.
        node_token: of the machine it is on.
        home: its home; files of the server are in `home/server`.
    """

    def __init__(self, home: Path, url: str, running: UvicornServer, thread: threading.Thread) -> None:
        self.home = home
        self.url = url
        self._running = running
        self._thread = thread
        self._connections: list[Connection] = []
        self.token = (home / "server" / "token").read_text(encoding="ascii").strip()
        self.node_token = (home / "server" / "node.token").read_text(encoding="ascii").strip()

    def connection(self, token: str | None = None, **options: Any) -> Connection:
        """Return a connection with a token, the administrator's unless another one is given; closed with the server."""
        made = Connection(self.url, self.token if token is None else token, **options)
        self._connections.append(made)
        return made

    @property
    def outside_port(self) -> int:
        """Return the port under which others reach it."""
        return self._running.port

    def renew(self) -> None:
        """Have it read its certificate again, and wait until it has."""
        self._running.renew().wait(STARTED_S)

    @property
    def busy(self) -> int:
        """Return how many requests go on."""
        return self._running.busy

    def wait_stopped(self) -> None:
        """Wait until it has stopped."""
        self._thread.join(STARTED_S)
        assert not self._thread.is_alive(), "the server did not stop"

    def stop(self) -> None:
        """Have it stop; it has when the `with` is left."""
        self._running.stop()

    def close(self) -> None:
        """Close what was opened here."""
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def served(
    home: Path,
    *,
    clock: Clock | None = None,
    changes: dict[str, Any] | None = None,
    decide: Callable[[Exposure], bool | None] = lambda _exposure: None,
    **options: Any,
) -> Iterator[Served]:
    """Serve a home in a thread.

    Args:
        home: made by the test; a second server of it finds what the first one left.
        clock: another one than the machine's.
        decide: what the operator answers who is asked whether several principals may share a uid.
        changes: fields of `Settings` that no option reaches, such as grace periods of seconds.
        options: of `sgpu up`; any free port and no node unless said.
    """
    settings = read_settings(home, {"port": 0, "node": False, **options})
    settings = msgspec.structs.replace(settings, **(changes or {}))
    started = threading.Event()
    found: list[tuple[str, UvicornServer]] = []
    failed: list[BaseException] = []

    def be_the_server() -> None:
        def ready(url: str, running: UvicornServer) -> None:
            found.append((url, running))
            started.set()

        try:
            serve(settings, ready=ready, decide=decide, clock=clock)
        except BaseException as error:  # noqa: BLE001 — raised again in the thread of the test
            failed.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=be_the_server, name="server", daemon=True)
    thread.start()
    assert started.wait(STARTED_S), "the server did not start"
    if failed:
        thread.join()
        raise failed[0]
    url, running = found[0]
    server = Served(home, url, running, thread)
    try:
        yield server
    finally:
        server.close()
        running.stop()
        thread.join(STARTED_S)
        if failed:
            raise failed[0]
        assert not thread.is_alive(), "the server did not stop"
