"""The server's process, from nothing to a socket that answers, and back.

    lock ─▶ socket (clients wait from here on) ─▶ database, migrate ─▶ first start ─▶ services ─▶ loops ─▶ ready
    SIGTERM, SIGINT ─▶ no new connections ─▶ streams end, requests finish (≤ 5 s) ─▶ loops ─▶ engine ─▶ database

Nothing is in memory that is not somewhere else, too, so a server that was killed starts like one that was stopped:
clients and nodes come again, and the loops look at what is written down. A second signal does not wait for requests.

Failure cases: another server of this home runs (it is named); the port is taken (it is named, when it was asked for);
the database does not answer or is of a newer version (said, and nothing was started); it is
another server's (`claim.py`), at the start or later.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.errors import ServerProblem
from serverless_gpu.server import logfile
from serverless_gpu.server.app import guarded
from serverless_gpu.server.assembly import assembled
from serverless_gpu.server.gate import LOOPBACK
from serverless_gpu.server.hub import Hub
from serverless_gpu.server.listening import BACKLOG, BoundedProtocol, bound, names, only_one, url_of
from serverless_gpu.server.settings import Settings

KEEP_ALIVE_S = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_logger = logging.getLogger(__name__)


class Running(uvicorn.Server):
    """A server that answers; `stop` may be called from any thread."""

    def __init__(self, config: uvicorn.Config, hub: Hub, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._hub = hub
        self._ready = ready

    def stop(self) -> None:
        """End in order, within some seconds; a second call does not wait for requests that go on."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, and say so."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, which would go on for ever, then everything else."""
        self._hub.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal; the process then ends by returning, not by the signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, lambda _number, _frame: self.stop()) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    settings: Settings,
    *,
    ready: Callable[[str, Running], None] = lambda _url, _running: None,
    clock: Clock | None = None,
) -> None:
    """Be the server until it is told to stop; blocks.

    Args:
        settings: what the server was told.
        ready: called once it answers, with its address on this machine and the handle that stops it.
        clock: for tests.

    Raises:
        ServerProblem: another server of this home or of this database runs, the port is taken, the database is of a
            newer version.
        ServerUnavailable: the database does not answer.
    """
    with only_one(settings.directory), _logged(settings), contextlib.closing(bound(settings)) as listening:
        url = url_of(settings, listening)
        _logger.info("process %d starts on %s", os.getpid(), url)
        with assembled(settings, url=url, clock=clock or SystemClock()) as assembly:
            app = guarded(
                assembly.services,
                hosts=(*LOOPBACK, *names(settings)),
                authenticate=assembly.admission.authenticate,
                reach=assembly.admission.reach,
            )
            running = Running(_configuration(settings, app), assembly.services.hub, ready=lambda: ready(url, running))
            assembly.claim.on_gone = running.stop
            running.run([listening])
            if assembly.claim.is_gone:
                raise ServerProblem("another server has taken the database over", hint="a database has one server")
        _logger.info("process %d has stopped", os.getpid())


def _configuration(settings: Settings, app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.stopping_s),
    )


@contextlib.contextmanager
def _logged(settings: Settings) -> Iterator[None]:
    handler = logfile.to_file(settings.directory / "server.log")
    try:
        yield
    finally:
        logfile.detach(handler)
