"""Runs the index proxy on its own address and port, in a thread of the server process.

The network rules of nodes close the port of the API for ranks. The proxy therefore has its own port, which builds reach
and which an administrator can add to the allow-list of a pool. Its own event loop keeps large downloads from delaying
the API.

Failure cases: a taken port or a missing address ends the start of the server. If the thread ends later, `/health`
reports the index proxy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from serverless_gpu.errors import InvalidValue
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.http.listener import BACKLOG, BoundedProtocol, bound_socket, is_loopback
from serverless_gpu.server.http.tls import Certificate

KEEP_ALIVE_S = 60
STARTED_S = 10.0
STOPPED_S = 5.0
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def served(application: ASGIApp, settings: Settings, certificate: Certificate | None) -> Iterator[IndexProxyThread]:
    """Serve the proxy until the end of the context.

    Raises:
        ServerProblem: the port is taken.
        InvalidValue: the address is not one of this machine, or tokens would cross a network unencrypted.
    """
    asked = settings.index_proxy
    assert asked is not None
    if not is_loopback(asked.host) and certificate is None and not settings.behind_proxy:
        raise InvalidValue(
            f"an index proxy that listens on {asked.host} would send tokens across the network unencrypted",
            hint="set a certificate with --tls-cert and --tls-key, or name a TLS proxy with --behind-proxy",
        )
    config = uvicorn.Config(
        application,
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    with contextlib.closing(bound_socket(asked.host, asked.port, option="--index-proxy")) as listening:
        config.load()
        if certificate is not None:
            config.ssl = certificate.context
        server = uvicorn.Server(config)
        thread = IndexProxyThread(server, lambda: server.run([listening]))
        thread.start()
        try:
            if not thread.wait_started():
                _log.error("the index proxy did not start within %s s", STARTED_S)
            _log.info("the index proxy listens on %s, port %d", asked.host, asked.port)
            yield thread
        finally:
            thread.stop()


class IndexProxyThread:
    """The thread of the index proxy."""

    def __init__(self, server: uvicorn.Server, run: Callable[[], None]) -> None:
        self._server = server
        self._thread = threading.Thread(target=run, name="index-proxy", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait_started(self) -> bool:
        """Return True once the proxy accepts requests."""
        tick = threading.Event()
        for _ in range(round(STARTED_S / 0.02)):
            if self._server.started or not self._thread.is_alive():
                break
            tick.wait(0.02)
        return bool(self._server.started)

    def problem(self) -> str:
        """Return "" while the proxy runs."""
        return "" if self._thread.is_alive() else "the index proxy has stopped: restart the server"

    def stop(self) -> None:
        """End all requests and the thread."""
        self._server.should_exit = True
        self._thread.join(STOPPED_S)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(STOPPED_S)
