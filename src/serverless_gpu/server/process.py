"""Runs the server process from start to graceful stop.

    lock ─▶ socket (clients can wait from here on) ─▶ database, migrate ─▶ first start ─▶ services ─▶ loops ─▶ ready
    SIGTERM, SIGINT ─▶ new requests: 503 ─▶ streams end, requests finish (≤ 30 s) ─▶ loops ─▶ engine ─▶ database
    SIGHUP ─▶ reload the certificate; open connections keep the old one. With a terminal: like SIGTERM

A killed server starts like a stopped server, because the server can restore all state in memory from disk or nodes.
After the start, clients and nodes reconnect. After a second stop signal, the server stops without waiting for requests.

Failure cases:
* If another server uses the same home directory, the error names the other server.
* If the configured port is taken, the error names the process that uses the port.
* If the database does not answer, the server waits (`startup.py`).
* If the database has a newer version, the server reports this version and does not start.
* If another server owns the database, at the start or later, the server stops (`leader_lock.py`).
* If requests do not finish before the stop deadline, the server cancels the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import uvicorn

from serverless_gpu import faults
from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.server.composition import Services, guarded
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.loops import JumpTolerantClock
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.leader_lock import TakenOver
from serverless_gpu.server.http import tls
from serverless_gpu.server.http.access_log import AccessLogMiddleware
from serverless_gpu.server.http.auth_middleware import LOOPBACK
from serverless_gpu.server.http.listener import (
    BACKLOG,
    BoundedProtocol,
    ListeningSockets,
    bind_sockets,
    host_names,
    lock_server,
    url_of,
)
from serverless_gpu.server.http.proxy_middleware import ProxyMiddleware
from serverless_gpu.server.http.tls import Certificate
from serverless_gpu.server.identity.uid_sharing import Exposure
from serverless_gpu.server.index_proxy import listener as index_listener
from serverless_gpu.server.index_proxy.application import IndexProxy
from serverless_gpu.server.operations import systemd
from serverless_gpu.server.startup import Operator, assembled

KEEP_ALIVE_S = 75
CUT_OFF_S = 2
"""Maximum seconds for canceled requests to end."""
SWITCH_S = 0.001
"""Interpreter switch interval between threads in seconds, below Python's default of 0.005."""
_LOOK_S = 0.02
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SECRET = re.compile(r"SECRET|PASSWORD|TOKEN|_KEY$")
"""Pattern of environment variable names whose values the server removes from its log."""
_logger = logging.getLogger(__name__)


class UvicornServer(uvicorn.Server):
    """Uvicorn server with a graceful stop from any thread.

    Attributes:
        warnings: messages for the operator who starts the server.
        sign_in_path: returns the path of a one-time link that signs a browser in as the local administrator.

    Args:
        config: configuration of uvicorn, whose application contains the proxy middleware.
        listening: the server's sockets.
        proxy: the middleware that ends all streams when the server stops.
        stopping_s: seconds in which running requests can finish when the server stops.
        certificate: certificate for HTTPS; None for plain HTTP.
        ready: called once the server accepts requests.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        listening: ListeningSockets,
        *,
        proxy: ProxyMiddleware,
        stopping_s: float,
        certificate: Certificate | None,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._listening = listening
        self._proxy = proxy
        self._stopping_s = stopping_s
        self._certificate = certificate
        self._ready = ready
        self._renew = threading.Event()
        self._renewed = threading.Event()
        self._systemd = systemd.taken_from(os.environ)
        self.warnings: tuple[str, ...] = ()
        self.sign_in_path: Callable[[], str] = lambda: ""

    def stop(self) -> None:
        """Stop the server after running requests have finished.

        A second call stops the server without waiting for requests.
        """
        self.force_exit = self.should_exit
        self.should_exit = True

    @property
    def port(self) -> int:
        """Return the main port of the server."""
        return int(self._listening.main.getsockname()[1])

    @property
    def certificate(self) -> str:
        """Return a message about the certificate, or "" without a certificate."""
        return "" if self._certificate is None else self._certificate.sentence()

    @property
    def certified(self) -> tuple[str, ...]:
        """Return the host names in the certificate."""
        return () if self._certificate is None else self._certificate.in_use.names

    @property
    def is_certificate_over(self) -> bool:
        """Return True if the server has an expired certificate."""
        return self._certificate is not None and self._certificate.is_over

    @property
    def busy(self) -> int:
        """Return the number of running requests."""
        return self._proxy.busy

    def renew(self) -> threading.Event:
        """Request a reload of the certificate, and return an event that the server sets after the reload."""
        self._renewed.clear()
        self._renew.set()
        return self._renewed

    def serve_until_stopped(self) -> None:
        """Serve requests until a signal or `stop` stops the server."""
        self.config.load()
        if self._certificate is not None:
            self.config.ssl = self._certificate.context
        self.run([self._listening.main])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve requests, and notify the caller and systemd."""
        await super().startup(sockets)
        if threading.current_thread() is threading.main_thread():
            # A server in the main thread may tune garbage collection and thread switching, because no other code uses
            # its process.
            gc.freeze()  # A full collection would visit all imported objects, which takes about 100 ms.
            # A short switch interval speeds up requests, which often wait for the interpreter lock.
            sys.setswitchinterval(SWITCH_S)
        if self._listening.beside is not None:
            made = await asyncio.get_running_loop().create_server(
                lambda: BoundedProtocol(
                    config=self.config, server_state=self.server_state, app_state=self.lifespan.state
                ),
                sock=self._listening.beside,
                backlog=self.config.backlog,
            )
            self.servers.append(made)
        self._ready()
        systemd.notify(self._systemd, "READY=1")

    async def on_tick(self, counter: int) -> bool:
        """Reload the certificate if another thread requested a reload.

        Return True if the uvicorn server must stop.
        """
        if self._renew.is_set():
            self._renew.clear()
            if self._certificate is None:
                _logger.info("SIGHUP: the server has no certificate to reload")
            else:
                await asyncio.to_thread(self._certificate.renew)
            self._renewed.set()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all streams, wait for other requests, and stop uvicorn."""
        systemd.notify(self._systemd, "STOPPING=1")
        _logger.info("the server stops and waits for requests: %d", self._proxy.busy)
        self._proxy.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._stopping_s
        while self._proxy.busy and not self.force_exit and loop.time() < deadline:
            await asyncio.sleep(_LOOK_S)
        if self._proxy.busy:
            _logger.warning("the server cancels %d requests that did not finish in time", self._proxy.busy)
        self.config.timeout_graceful_shutdown = CUT_OFF_S
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle stop signals with a graceful stop and a normal exit of the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, lambda _number, _frame: self.stop()) for number in _SIGNALS}
        if sys.stdin is None or not sys.stdin.isatty():
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda _number, _frame: self._renew.set())
        else:  # With a terminal, SIGHUP means that the user has closed the terminal.
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda _number, _frame: self.stop())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    settings: Settings,
    *,
    ready: Callable[[str, UvicornServer], None] = lambda _url, _running: None,
    announce: Callable[[str], None] = lambda _line: None,
    decide: Callable[[Exposure], bool | None] = lambda _exposure: None,
    renewed: Callable[[str, UvicornServer], None] = lambda _url, _running: None,
    clock: Clock | None = None,
) -> None:
    """Run the server until a signal or `stop` stops it. Blocks.

    Args:
        settings: settings of the server.
        ready: called once the server accepts requests, with its local address and the handle that stops it.
        announce: called with a message while the start waits for the database. The log also contains the message.
        decide: called earlier during the start to decide if several principals may share a uid, as in
            `uid_sharing.settle`.
        renewed: called like `ready`, in another thread, after the server replaced a token in a file.
        clock: replaces the system clock in tests.

    Raises:
        ServerProblem: another server uses this home or this database, the port is taken, or the database has a newer
            version.
        TakenOver: another server has replaced this server.
        ServerUnavailable: the database does not answer.
    """
    clock = clock or JumpTolerantClock(SystemClock())
    may_share = not settings.database.startswith("sqlite")
    with (
        lock_server(settings.directory, may_share=may_share) as other,
        _logged(settings),
        contextlib.closing(bind_sockets(settings)) as listening,
    ):
        url = url_of(settings, listening)
        _logger.info("process %d starts on %s", os.getpid(), url)
        if faults.named():
            _logger.warning("%s", faults.warning())
        if other:
            _logger.warning("%s. The database allows only one server at a time", other)
        certificate = _certificate(settings, clock)

        def waiting(line: str) -> None:
            _logger.warning("%s", line)
            announce(line)

        operator = Operator(announce=waiting, decide=decide, renewed=lambda: renewed(url, running))
        with assembled(settings, url=url, clock=clock, other=other, operator=operator) as assembly:
            services = assembly.services
            app = guarded(
                services.by_type,
                hub=services.hub,
                clock=services.clock,
                measures=services.measures,
                hosts=(*LOOPBACK, *host_names(settings, certificate.in_use.names if certificate else ())),
                authenticate=assembly.authenticator.authenticate,
                reach=assembly.authenticator.reach,
                authenticate_session=assembly.authenticator.authenticate_session if settings.ui else None,
                proxies=settings.behind_proxy,
                base=settings.path_prefix,
            )
            running = UvicornServer(
                _configuration(app),
                listening,
                proxy=app.proxy,
                stopping_s=settings.stopping_s,
                certificate=certificate,
                ready=lambda: ready(url, running),
            )
            running.warnings = assembly.warnings
            administrator = Caller(name=assembly.tokens.principal)
            running.sign_in_path = lambda: services.sessions.link(administrator).path
            assembly.leader_lock.on_gone = running.stop
            with _index_proxy(services, certificate):
                running.serve_until_stopped()
            if assembly.leader_lock.is_gone:
                hint = "stop the other server before you start this server again"
                raise TakenOver("another server has taken the database over", hint=hint)
        _logger.info("process %d has stopped", os.getpid())


def _certificate(settings: Settings, clock: Clock) -> Certificate | None:
    if not settings.tls_cert:
        (settings.directory / tls.FILE).unlink(missing_ok=True)
        return None
    return Certificate(settings.tls_cert, settings.tls_key, directory=settings.directory, clock=clock)


@contextlib.contextmanager
def _index_proxy(services: Services, certificate: Certificate | None) -> Iterator[None]:
    """Serve the index proxy if the settings name its address."""
    if services.settings.index_proxy is None:
        yield
        return
    application = ProxyMiddleware(services.make(IndexProxy), hub=services.hub, proxies=services.settings.behind_proxy)
    with index_listener.served(application, services.settings, certificate) as thread:
        services.health.watch("index_proxy", thread.problem)
        yield


def _configuration(app: AccessLogMiddleware) -> uvicorn.Config:
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
    )


@contextlib.contextmanager
def _logged(settings: Settings) -> Iterator[None]:
    named = [value for name, value in os.environ.items() if _SECRET.search(name)]
    passwords = filter(None, (urlsplit(url).password for url in (settings.database, settings.mlflow_store)))
    handler = server_log.to_file(settings.directory / "server.log", [*named, *passwords])
    try:
        yield
    finally:
        server_log.detach(handler)
