"""Provides the server's HTTP routes as methods, with one connection pool per process.

Each request waits up to ten minutes for an unreachable server and prints one notice. The environment variable
`SERVERLESS_GPU_PATIENCE` sets a different limit in seconds. Each event stream has a separate connection
(`event_stream.py`), because a process may have many long streams. Closing one event stream must not affect another
stream. If a token expires while the client waits for a run, the client waits for a new token (`wait_for_token`). A new
request with an expired token fails at once.

A forked child opens new connections. If the server does not answer or refuses the token, the client reads the profile
again. The server may have restarted on another port or with new tokens.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.display.run_display import TerminalDisplay
from serverless_gpu.client.remote.profile import TOKEN, ServerProfile, find_profile, patience_s, reread
from serverless_gpu.environment.service_messages import StoreLocation
from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.model.cost import Cost
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.wire.access import PrincipalView
from serverless_gpu.wire.blobs import DigestList
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import PoolList, PoolView
from serverless_gpu.wire.runs import (
    AttemptList,
    AttemptView,
    CostView,
    EstimateRequest,
    EstimateView,
    RunRequest,
    RunView,
    StopRequest,
)
from serverless_gpu.wire.server_status import Version

T = TypeVar("T")
_LOG_PIECE_BYTES = 4 << 20
_TOKEN_LOOK_S = 0.5  # Interval in seconds between checks for a new token.


class RemoteServer:
    """HTTP client of one server, with one principal's credentials.

    The client reads a changed address or token from `home` and `environ`. `patience_s` is the maximum wait for an
    unreachable server, in seconds.
    """

    def __init__(
        self,
        profile: ServerProfile,
        patience_s: float,
        home: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.profile = profile
        self._home = home
        self._environ = environ or {}
        self.patience_s = patience_s
        self._patient = Connection(self.look_again, self.token, patience_s=patience_s, announce=_say, ca=profile.ca)
        self._prompt = Connection(self.look_again, self.token, ca=profile.ca)
        self._version: Version | None = None
        self._principal = profile.principal

    def close(self) -> None:
        """Close all connections except event stream connections."""
        self._patient.close()
        self._prompt.close()

    def look_again(self) -> str:
        """Read the profile again and return the server's current address."""
        self._reread()
        return self.profile.url

    def token(self) -> str:
        """Return the current token."""
        self._reread()
        return self.profile.token

    def _reread(self) -> None:
        if self._home is not None:
            self.profile = reread(self._home, self.profile, self._environ)

    def wait_for_token(
        self, ended: NotAuthenticated, used: str, *, say: Callable[[str], None], closed: threading.Event
    ) -> bool:
        """Wait for a token other than `used`. Return False if `closed` is set.

        Prints one message about the wait with `say`. Raises NotAuthenticated after `patience_s`, or if the client
        cannot read a new token.
        """
        clock = SystemClock()
        until_ns = clock.boottime_ns() + round(self.patience_s * 1e9)
        told = False
        while self.token() == used:
            if self._home is None or clock.boottime_ns() >= until_ns:
                raise ended
            if not told:
                told = True
                other = f"store a new token with `sgpu login {self.profile.url}` in a terminal"
                if self._environ.get(TOKEN):
                    other = f"set {TOKEN} of this process to a new token"
                say(f"{ended.message}: {other}; the run continues while the client waits for the new token")
            if closed.wait(min(_TOKEN_LOOK_S, self.patience_s)):
                return False
        return True

    def with_valid_token(self, ask: Callable[[], T]) -> T:
        """Return the result of `ask`. If the token expires, wait for a new token and call `ask` again."""
        while True:
            used = self.profile.token
            try:
                return ask()
            except NotAuthenticated as error:
                self.wait_for_token(error, used, say=_say, closed=threading.Event())

    def connect(self) -> Connection:
        """Return a new connection for one event stream. The caller must close the connection."""
        return Connection(self.profile.url, self.profile.token, ca=self.profile.ca)

    def store(self) -> StoreLocation:
        """Return the location of the server's environment store."""
        return StoreLocation(f"sgpu+{self.profile.url.rstrip('/')}", self.profile.token, self.profile.ca)

    def version(self, *, patiently: bool = True) -> Version:
        """Return the server's cached version. If `patiently` is True, wait for an unreachable server."""
        if self._version is None:
            connection = self._patient if patiently else self._prompt
            self._version = connection.ask("GET", "/version", answer=Version)
        return self._version

    def principal(self) -> str:
        """Return the caller's cached principal name."""
        if not self._principal:
            self._principal = self._patient.ask("GET", "/whoami", answer=PrincipalView).name
        return self._principal

    def pools(self, *, patiently: bool = True) -> tuple[PoolView, ...]:
        """Return the server's pools. If `patiently` is True, wait for an unreachable server."""
        return (self._patient if patiently else self._prompt).ask("GET", "/pools", answer=PoolList).pools

    def submit(self, request: RunRequest) -> RunView:
        """Submit a run. A repeated request with the same run identifier starts no second run."""
        return self._patient.ask("POST", "/runs", request, answer=RunView)

    def estimate(self, request: EstimateRequest) -> EstimateView:
        """Return the estimated start time of a run. Do not wait for an unreachable server."""
        return self._prompt.ask("POST", "/estimates", request, answer=EstimateView)

    def run(self, run_id: str, *, patiently: bool = True) -> RunView:
        """Return the current state of a run."""
        return (self._patient if patiently else self._prompt).ask("GET", f"/runs/{run_id}", answer=RunView)

    def attempts(self, run_id: str) -> tuple[AttemptView, ...]:
        """Return all attempts of a run in order."""
        return self._patient.ask("GET", f"/runs/{run_id}/attempts", answer=AttemptList).attempts

    def receipt_of(self, run_id: str, fence: int, crew: int) -> Receipt:
        """Return one node's receipt of a multi-node attempt."""
        query = {"fence": str(fence), "crew": str(crew)}
        return self._patient.ask("GET", f"/runs/{run_id}/receipt", answer=Receipt, query=query)

    def cost(self, run_id: str) -> Cost:
        """Return a run's usage and cost so far. Do not wait for an unreachable server."""
        return self._prompt.ask("GET", f"/runs/{run_id}/cost", answer=CostView).cost

    def stop(self, run_id: str, why: StopReason, *, patiently: bool) -> RunView:
        """Ask the server to stop a run. If `patiently` is True, wait for an unreachable server."""
        connection = self._patient if patiently else self._prompt
        return connection.ask("POST", f"/runs/{run_id}/stop", StopRequest(reason=why), answer=RunView)

    def read_file(self, run_id: str, fence: int, name: str, start: int, length: int) -> bytes:
        """Return a part of a run's output file."""
        path = f"/runs/{run_id}/files/{name}"
        return self._patient.get(path, query={"fence": str(fence)}, start=start, length=length)

    def read_log(self, run_id: str, fence: int, rank: int, stream: str) -> bytes:
        """Return a rank's stored output."""
        pieces: list[bytes] = []
        offset = 0
        while True:
            query = {"fence": str(fence), "offset": str(offset), "limit": str(_LOG_PIECE_BYTES)}
            data, headers = self._patient.fetch(f"/runs/{run_id}/logs/{rank}/{stream}", query=query)
            if not data:
                return b"".join(pieces)
            pieces.append(data)
            offset = int(headers.get("SGPU-Next-Offset", offset + len(data)))

    def missing_parts(self, digests: tuple[str, ...]) -> tuple[str, ...]:
        """Return the digests of payload parts that the server does not have."""
        return self._patient.ask("POST", "/blobs/missing", DigestList(digests=digests), answer=DigestList).digests

    def put_part(self, digest: str, data: bytes | memoryview) -> None:
        """Store a payload part on the server."""
        self._patient.put(f"/blobs/{digest}", data)


_servers: dict[tuple[ServerProfile, float], RemoteServer] = {}
_making = threading.Lock()


def _forget_all() -> None:
    global _making
    _servers.clear()
    _making = threading.Lock()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def close_all() -> None:
    """Close this process's connections. The next request opens new connections."""
    with _making:
        for server in _servers.values():
            server.close()
        _servers.clear()


def server_of(home: Path, environ: Mapping[str, str]) -> RemoteServer:
    """Return this process's client of the configured server.

    Raise ServerNotConfigured if no server is configured.
    """
    profile = find_profile(home, environ)
    seconds = patience_s(environ)
    with _making:
        known = _servers.get((profile, seconds))
        if known is None:
            known = _servers[profile, seconds] = RemoteServer(profile, seconds, home, environ)
        return known


def _say(sentence: str) -> None:
    TerminalDisplay(quiet=False).say(sentence)
