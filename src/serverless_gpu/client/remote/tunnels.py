"""Connects to attempts of a server's runs through tunnels.

    open_remote_endpoint(run, target) ──▶ one tunnel per run and process ──▶ a new stream of the tunnel

A process keeps the tunnel of a run open until the run or the process ends, because a further stream needs no request.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping

from serverless_gpu.ambient import new_run_id
from serverless_gpu.client.remote.server import RemoteServer, server_of
from serverless_gpu.errors import NotAuthenticated, NotFound, ServerlessGpuError, ServerUnavailable
from serverless_gpu.model.endpoint import EndpointTarget
from serverless_gpu.model.tunnel_end import TunnelMessage
from serverless_gpu.node.base.home import Home
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.tunnel_pump import TunnelPump
from serverless_gpu.wire.tunnels import SentMessage, TunnelAnswer, TunnelRequest, TunnelView

AWAY_S = 3600.0
_lock = threading.Lock()
_pumps: dict[str, TunnelPump] = {}


def open_remote_endpoint(home: Home, run_id: str, target: EndpointTarget, environ: Mapping[str, str]) -> socket.socket:
    """Return a socket that is connected to a target in a run of the server.

    The first line of the socket is the target's answer.

    Raises:
        NotAllowed: the run belongs to another principal.
        AlreadyFinished: the run has ended.
        InvalidValue: the run has not started yet.
        ServerUnavailable: the server does not answer.
    """
    with _lock:
        pump = _pumps.get(run_id)
        if pump is None or pump.over.is_set():
            transport = UserTransport(server_of(home.root, environ), run_id)
            try:
                transport.open()
            except BaseException:
                transport.hang_up()
                raise
            pump = _pumps[run_id] = TunnelPump(transport, None, away_s=AWAY_S)
            pump.start()
    return pump.open(target)


@atexit.register
def _close_all() -> None:
    for pump in _pumps.values():
        with contextlib.suppress(ServerlessGpuError, OSError):
            pump.close()


def _forget_all() -> None:
    _pumps.clear()  # The threads of the pumps exist only in the parent process.


os.register_at_fork(after_in_child=_forget_all)


class UserTransport:
    """The way of the owner's end of one tunnel to the server."""

    def __init__(self, server: RemoteServer, run_id: str) -> None:
        self._path = f"/runs/{run_id}/tunnels/{new_run_id()}"
        ca = server.profile.ca
        self._reader = Connection(server.look_again, server.token, ca=ca)
        self._writer = Connection(server.look_again, server.token, ca=ca)

    def open(self) -> None:
        """Open the tunnel at the server."""
        self._writer.ask("PUT", self._path, TunnelRequest(), answer=TunnelView)

    def messages(self, received: int) -> Iterator[TunnelMessage]:
        """Yield messages of the node. After a restart of the server, open the tunnel again."""
        try:
            yield from self._reader.stream(
                "GET", f"{self._path}/messages", answer=TunnelMessage, query={"received": str(received)}
            )
        except NotFound:
            self.open()
        except NotAuthenticated as error:
            raise ServerUnavailable(error.message) from None

    def send(self, message: TunnelMessage) -> bool:
        """Send a message to the node."""
        try:
            answer: TunnelAnswer = self._writer.ask(
                "POST", f"{self._path}/messages", SentMessage(message=message), answer=TunnelAnswer
            )
        except (NotFound, NotAuthenticated):
            return False  # `messages` opens the tunnel again.
        return answer.taken

    def close(self) -> None:
        """Close the tunnel at the server, and the connections."""
        with contextlib.suppress(ServerlessGpuError):
            self._writer.ask("DELETE", self._path, answer=type(None))
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connections to the server."""
        self._reader.close()
        self._writer.close()
