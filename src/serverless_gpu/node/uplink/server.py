"""The server as this node sees it: connections with the node's own token and with those of attempts.

A changed profile file makes a new connection: the server was started on another port, or its tokens were changed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.uplink.credentials import Credentials
from serverless_gpu.node.uplink.profile import UplinkProfile, read_profile
from serverless_gpu.node.uplink.server_time import ServerTime
from serverless_gpu.wire.connection import Connection

_PAUSE_S = 0.1
PAUSE_S_MAX = 5.0


class UplinkServer:
    """One server; raises InvalidValue when its profile cannot be read."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path  # of the profile
        self._clock = clock
        self._profile = read_profile(path)
        self._answered_ns = clock.boottime_ns()
        self.credentials = Credentials()  # tokens of attempts
        self.time = ServerTime()

    @property
    def profile(self) -> UplinkProfile:
        """Return how the server is reached."""
        return self._profile

    def line(self, token: str | Callable[[], str] = "") -> ServerConnection:
        """Return a line to it, with the node's own token where none is given."""
        return ServerConnection(self, token)

    def look_again(self) -> None:
        """Read the profile again; all connections follow it."""
        with contextlib.suppress(InvalidValue):  # gone, or being written: keep the known one
            self._profile = read_profile(self.path)

    def answered(self) -> None:
        """Note that it has answered just now."""
        self._answered_ns = self._clock.boottime_ns()

    def silent_s(self) -> float:
        """Return for how long it has not answered anything, in seconds."""
        return (self._clock.boottime_ns() - self._answered_ns) / 1e9


class ServerConnection:
    """A connection that always leads to where the profile says.

    `token` is an attempt's, or returns its current one; "" for the node's own.
    """

    def __init__(self, server: UplinkServer, token: str | Callable[[], str]) -> None:
        self._server = server
        self._token = token
        self._profile = server.profile
        self._connection = self._made()

    def get(self) -> Connection:
        """Return the connection; it may be another one than before. One thread uses a line."""
        if self._server.profile != self._profile:
            self._connection.close()
            self._profile = self._server.profile
            self._connection = self._made()
        self._connection.renew()
        return self._connection

    def close(self) -> None:
        """Close it."""
        self._connection.close()

    def _made(self) -> Connection:
        return Connection(self._profile.url, self._token or self._profile.token, ca=self._profile.ca)


class Backoff:
    """Longer and longer pauses, each of them a little random so that many do not come at once."""

    def __init__(self) -> None:
        self._pause_s = _PAUSE_S

    def next_s(self) -> float:
        """Return how long to wait now, in seconds."""
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        return pause_s

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._pause_s = _PAUSE_S
