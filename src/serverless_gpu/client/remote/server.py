"""A server as the client uses it: its routes as methods, and one pool of connections for each process and server.

A call waits for a server that is away for ten minutes, or the seconds in `SERVERLESS_GPU_PATIENCE`, with one notice.
Streams have connections of their own (`event_stream.py`): they may be many and long, and closing one must not touch the
others. When a token ends during a wait, the wait goes on until there is another one (`wait_for_token`); a new request
is refused at once.

A forked child makes connections of its own. The address and token are read again when the server does not answer or
refuses the token: it may have restarted on another port or with other tokens.
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
_TOKEN_LOOK_S = 0.5  # between two looks for another token


class RemoteServer:
    """One server, as one principal.

    `home` and `environ` may name another address or token later; `patience_s` bounds the wait for a server that is
    away.
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
        """Close its connections, but those of streams."""
        self._patient.close()
        self._prompt.close()

    def look_again(self) -> str:
        """Return the server's address as it is by now."""
        self._reread()
        return self.profile.url

    def token(self) -> str:
        """Return the token as it is by now."""
        self._reread()
        return self.profile.token

    def _reread(self) -> None:
        if self._home is not None:
            self.profile = reread(self._home, self.profile, self._environ)

    def wait_for_token(
        self, ended: NotAuthenticated, used: str, *, say: Callable[[str], None], closed: threading.Event
    ) -> bool:
        """Wait for a token other than `used`, and `say` so once; return False when `closed`.

        Raises NotAuthenticated when patience is over, or when no source could provide another token.
        """
        clock = SystemClock()
        until_ns = clock.boottime_ns() + round(self.patience_s * 1e9)
        told = False
        while self.token() == used:
            if self._home is None or clock.boottime_ns() >= until_ns:
                raise ended
            if not told:
                told = True
                other = f"`sgpu login {self.profile.url}` in a terminal stores another one"
                if self._environ.get(TOKEN):
                    other = f"put another one into {TOKEN} of this process"
                say(f"{ended.message}: {other}, and this wait goes on; the run does in any case")
            if closed.wait(min(_TOKEN_LOOK_S, self.patience_s)):
                return False
        return True

    def with_valid_token(self, ask: Callable[[], T]) -> T:
        """Return the answer for a waiting caller, waiting for a new token when the current one ends."""
        while True:
            used = self.profile.token
            try:
                return ask()
            except NotAuthenticated as error:
                self.wait_for_token(error, used, say=_say, closed=threading.Event())

    def connect(self) -> Connection:
        """Return a connection for one stream; the caller closes it."""
        return Connection(self.profile.url, self.profile.token, ca=self.profile.ca)

    def store(self) -> StoreLocation:
        """Return where environments are put for runs of this server."""
        return StoreLocation(f"sgpu+{self.profile.url.rstrip('/')}", self.profile.token, self.profile.ca)

    def version(self, *, patiently: bool = True) -> Version:
        """Return the server's version, fetched once; `patiently` waits for a server that is away."""
        if self._version is None:
            connection = self._patient if patiently else self._prompt
            self._version = connection.ask("GET", "/version", answer=Version)
        return self._version

    def principal(self) -> str:
        """Return the caller's principal, fetched once."""
        if not self._principal:
            self._principal = self._patient.ask("GET", "/whoami", answer=PrincipalView).name
        return self._principal

    def pools(self, *, patiently: bool = True) -> tuple[PoolView, ...]:
        """Return the server's pools; `patiently` waits for a server that is away."""
        return (self._patient if patiently else self._prompt).ask("GET", "/pools", answer=PoolList).pools

    def submit(self, request: RunRequest) -> RunView:
        """Ask for a run; the same request again means the same run."""
        return self._patient.ask("POST", "/runs", request, answer=RunView)

    def estimate(self, request: EstimateRequest) -> EstimateView:
        """Return when a run would start; a server that is away is not waited for."""
        return self._prompt.ask("POST", "/estimates", request, answer=EstimateView)

    def run(self, run_id: str, *, patiently: bool = True) -> RunView:
        """Return a run as it is now."""
        return (self._patient if patiently else self._prompt).ask("GET", f"/runs/{run_id}", answer=RunView)

    def attempts(self, run_id: str) -> tuple[AttemptView, ...]:
        """Return all tries at a run, in order."""
        return self._patient.ask("GET", f"/runs/{run_id}/attempts", answer=AttemptList).attempts

    def receipt_of(self, run_id: str, fence: int, crew: int) -> Receipt:
        """Return the account of one node of an attempt on several."""
        query = {"fence": str(fence), "crew": str(crew)}
        return self._patient.ask("GET", f"/runs/{run_id}/receipt", answer=Receipt, query=query)

    def cost(self, run_id: str) -> Cost:
        """Return a run's use and cost so far, without waiting for a server that is away."""
        return self._prompt.ask("GET", f"/runs/{run_id}/cost", answer=CostView).cost

    def stop(self, run_id: str, why: StopReason, *, patiently: bool) -> RunView:
        """Request a run's stop; `patiently` waits for a server that is away."""
        connection = self._patient if patiently else self._prompt
        return connection.ask("POST", f"/runs/{run_id}/stop", StopRequest(reason=why), answer=RunView)

    def read_file(self, run_id: str, fence: int, name: str, start: int, length: int) -> bytes:
        """Return a part of an output of a run."""
        path = f"/runs/{run_id}/files/{name}"
        return self._patient.get(path, query={"fence": str(fence)}, start=start, length=length)

    def read_log(self, run_id: str, fence: int, rank: int, stream: str) -> bytes:
        """Return the kept output of a rank."""
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
        """Return which parts the server lacks."""
        return self._patient.ask("POST", "/blobs/missing", DigestList(digests=digests), answer=DigestList).digests

    def put_part(self, digest: str, data: bytes | memoryview) -> None:
        """Store a part."""
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
    """Close the connections of this process; the next call makes new ones."""
    with _making:
        for server in _servers.values():
            server.close()
        _servers.clear()


def server_of(home: Path, environ: Mapping[str, str]) -> RemoteServer:
    """Return the server of remote calls, one per process; raise ServerNotConfigured without one."""
    profile = find_profile(home, environ)
    seconds = patience_s(environ)
    with _making:
        known = _servers.get((profile, seconds))
        if known is None:
            known = _servers[profile, seconds] = RemoteServer(profile, seconds, home, environ)
        return known


def _say(sentence: str) -> None:
    TerminalDisplay(quiet=False).say(sentence)
