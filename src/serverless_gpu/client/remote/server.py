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
import contextlib
import os
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.display.run_display import TerminalDisplay
from serverless_gpu.environment.service_messages import StoreLocation
from serverless_gpu.errors import InvalidValue, NotAuthenticated, ServerlessGpuError, ServerNotConfigured
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.cost import Cost
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.node.base.home import Home, find_durable_home, find_home, storage_error
from serverless_gpu.wire.access import PrincipalView
from serverless_gpu.wire.blobs import DigestList
from serverless_gpu.wire.estimates import EstimateRequest, EstimateView
from serverless_gpu.wire.http_client import Connection
from serverless_gpu.wire.nodes import PoolList, PoolView
from serverless_gpu.wire.runs import AttemptList, AttemptView, CostView, RunRequest, RunView, StopRequest
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


SERVER = "SERVERLESS_GPU_SERVER"
TOKEN = "SERVERLESS_GPU_TOKEN"
FILE = "server.json"
PATIENCE = "SERVERLESS_GPU_PATIENCE"
PATIENCE_S = 600.0
_notes_said: set[str] = set()


class ServerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and the caller's principal on it."""

    url: str
    token: str
    principal: str = ""  # owner of the token; "" where unknown
    embedded: bool = False  # written by `sgpu up` of this home
    machine: str = ""  # `ambient.machine()` of the server when written, or ""
    ca: str = ""  # file with certificates to trust; "" for the system's


def remote_home(environ: Mapping[str, str]) -> Home:
    """Return the home for remote calls: it names the server and keeps copies of results.

    A temporary replacement suffices where variables name the server, which keeps everything itself.
    """
    if not environ.get(SERVER):
        return find_durable_home(environ, f"its {FILE} says which server there is")
    home = find_home(environ)
    if home.note and home.note not in _notes_said:
        _notes_said.add(home.note)
        warnings.warn(home.note, stacklevel=4)
    return home


def find_profile(home: Path, environ: Mapping[str, str]) -> ServerProfile:
    """Return the configured server; raise ServerNotConfigured without one."""
    url, token = environ.get(SERVER, ""), environ.get(TOKEN, "")
    if url:
        if not token:
            raise ServerNotConfigured(
                f"{SERVER} is set, and {TOKEN} is not", hint="a server needs a token: `sgpu token`"
            )
        profile = ServerProfile(url=url, token=token)
    else:
        profile = _read(home / FILE)
        if token:
            profile = msgspec.structs.replace(profile, token=token, principal="")
    check_address(profile.url)
    return profile


def is_configured(home: Path, environ: Mapping[str, str]) -> bool:
    """Return whether a variable or the home's file names a server, validly or not."""
    return bool(environ.get(SERVER)) or (home / FILE).exists()


def reread(home: Path, known: ServerProfile, environ: Mapping[str, str]) -> ServerProfile:
    """Return the current address and token of a known server, or `known` without news.

    Both may change at once: a restart on another port, replaced tokens. They come from one place, so that a token only
    goes to the address stored with it. A different server or principal is ignored: the wait is on this server as this
    principal.
    """
    try:
        there = find_profile(home, environ)
    except ServerlessGpuError:  # gone, or another process is writing it
        return known
    same_token = there.token == known.token and not environ.get(TOKEN)  # the variable's says nothing about the server
    same_principal = there.principal == known.principal or not (there.principal and known.principal)
    return there if same_token or (same_principal and _is_same_server(there, known)) else known


def _is_same_server(there: ServerProfile, known: ServerProfile) -> bool:
    """Return whether profiles share the address, this home's `sgpu up`, or host and principal."""
    if there.url.rstrip("/") == known.url.rstrip("/"):
        return True
    if there.embedded and known.embedded:
        return there.machine == known.machine or not (there.machine and known.machine)
    if there.embedded or known.embedded or not there.principal:
        return False
    return _host(there) == _host(known) and there.principal == known.principal


def _host(profile: ServerProfile) -> tuple[str, str | None]:
    parts = urlsplit(profile.url)
    return parts.scheme, parts.hostname


def patience_s(environ: Mapping[str, str]) -> float:
    """Return the seconds to wait for a server that is away."""
    text = environ.get(PATIENCE)
    if not text:
        return PATIENCE_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:  # NaN is neither
        raise InvalidValue(f"{PATIENCE}={text!r} is not a number of seconds up to a day", hint="the default is 600")
    return value


def write_profile(home: Path, profile: ServerProfile) -> None:
    """Store a server, readable for its user only."""
    path = home / FILE
    temporary = path.with_name(f".{FILE}-{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise storage_error(error, path) from None


def _read(path: Path) -> ServerProfile:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        missing = ServerNotConfigured(
            "remote=True needs a server, and none is configured",
            hint="`sgpu up` starts one on this machine, `sgpu login` takes one that is there; "
            "without remote, it runs on this machine",
        )
        missing.is_missing = True
        raise missing from None
    except OSError as error:
        raise ServerNotConfigured(f"{path} cannot be read: {error.strerror}") from None
    try:
        return from_json(data, ServerProfile)
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"{path} cannot be understood: {error}", hint="`sgpu login` writes it anew") from None


def check_address(url: str) -> None:
    """Raise InvalidValue for a malformed address, or one that would send the token unencrypted."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise InvalidValue(
            "the address of the server is not one",
            hint="it begins with https:// or http://, for example https://gpus.example.org or http://127.0.0.1:7878",
        )
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise InvalidValue(
            f"{url} would carry the token readably over the network",
            hint="use https://, or a tunnel: ssh -L 7878:127.0.0.1:7878 the-server",
        )


def _is_loopback(host: str) -> bool:
    for family, packed in ((socket.AF_INET, b"\x7f"), (socket.AF_INET6, bytes(15) + b"\x01")):
        with contextlib.suppress(OSError, ValueError):
            return socket.inet_pton(family, host).startswith(packed)
    return host == "localhost"
