"""Listening sockets and connections of the server, and the locks by which a home has one server only.

    lock     server.lock and server/lock, held as long as the process lives: a second server of the home is
             refused. Servers of one PostgreSQL may share server/: the database decides which of them works
             (`leader_lock.py`)
    port     as asked for; else the one of last time (server/port), else 7878, else any free one, which is remembered
    beside   a second socket on loopback, without TLS, where the first is not one of loopback in the clear: this
             machine's own node and clients use that, so nothing of theirs depends on a name or a certificate
    protocol uvicorn's, with bounds on what it lacks bounds for: headers that never end, or come a byte at a time;
             connections that say nothing; and how many there are, so that the server never runs out of descriptors:
             where there are too many, the one that is idle for the longest time goes

The port is remembered, so that clients of before find the server again after it was started again. Only where no port
was asked for may it be another one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import itertools
import os
import resource
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from serverless_gpu.errors import InvalidValue, ServerProblem
from serverless_gpu.node.base.requirements import lock_error
from serverless_gpu.server.core.settings import PORT, Settings

BACKLOG = 2048
HEAD_BYTES_MAX = 64 << 10
"""Of a request line and headers; what `AuthMiddleware` lets through is less."""
HEAD_S = 20.0
"""How long a connection may take to send the headers of a request, and the first to begin."""
CONNECTIONS_MAX = 10_000
OTHER_FILES = 256
"""Descriptors that are not for connections: the database's, logs, bodies on their way."""
_turns = itertools.count()

_HINT = "`sgpu status` shows it; another SERVERLESS_GPU_HOME gets a server of its own"


@contextlib.contextmanager
def lock_server(directory: Path, *, may_share: bool = False) -> Iterator[str]:
    """Hold the locks of a server: of its home, and of its directory, which may have been moved or copied.

    Args:
        directory: the server's.
        may_share: whether a process of another home may hold the directory's lock: it stood still, and the database
            decides whether this one replaces it.

    Yields:
        Who holds the directory's lock instead, or "".
    """
    with lock_home(directory), contextlib.ExitStack() as stack:
        directory.mkdir(mode=0o700, exist_ok=True)
        other = ""
        try:
            stack.enter_context(_held(directory / "lock"))
        except ServerProblem as error:
            if not may_share:
                raise
            other = error.message
        yield other


@contextlib.contextmanager
def lock_home(directory: Path, *, hint: str = _HINT) -> Iterator[None]:
    """Have no server run meanwhile whose directory this is, or was before it was moved away."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _held(directory.with_name(f"{directory.name}.lock"), hint):
        yield


@contextlib.contextmanager
def _held(path: Path, hint: str = _HINT) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
            raise ServerProblem(
                f"a server of this home runs already{': ' + said if said else ''}",
                hint=hint,
            ) from None
        except OSError as error:
            raise lock_error(path, error.strerror or str(error)) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()}".encode(), 0)
        yield
    finally:
        os.close(fd)


class ListeningSockets(NamedTuple):
    """What a server listens on.

    Attributes:
        main: what others reach.
        beside: on loopback in the clear, for this machine; None where `main` is that.
    """

    main: socket.socket
    beside: socket.socket | None

    def close(self) -> None:
        """Close both."""
        self.main.close()
        if self.beside is not None:
            self.beside.close()


def bind_sockets(settings: Settings) -> ListeningSockets:
    """Return the sockets a server listens on, bound.

    Raises:
        ServerProblem: the port that was asked for is taken.
        InvalidValue: there is no such address here, or tokens would cross a network in the clear.
    """
    is_safe = bool(settings.tls_cert or settings.behind_proxy)
    if not is_safe and not _is_loopback(settings.host):
        raise InvalidValue(
            f"listening on {settings.host} would send tokens across the network as they are",
            hint="give a certificate with --tls-cert and --tls-key; or listen on loopback behind a proxy that speaks "
            "TLS, with its name in --allow-host; or say where that proxy is: --behind-proxy ADDRESS",
        )
    if settings.port is not None:
        main = _bound(settings.host, settings.port)
    else:
        main = _remembered(settings.host, settings.directory / "port", PORT)
    if not settings.tls_cert and (_is_loopback(settings.host) or _is_unspecified(settings.host)):
        return ListeningSockets(main, None)
    try:
        return ListeningSockets(main, _remembered("127.0.0.1", settings.directory / "port.here", PORT + 1))
    except ServerProblem:
        main.close()
        raise


def url_of(settings: Settings, listening: ListeningSockets) -> str:
    """Return the address under which this machine reaches the server: on loopback, in the clear."""
    if listening.beside is not None:
        return f"http://127.0.0.1:{listening.beside.getsockname()[1]}"
    host = settings.host
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.main.getsockname()[1]}"


def host_names(settings: Settings, certified: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names, beside those of loopback, under which the server may be reached."""
    own = () if _is_unspecified(settings.host) else (settings.host,)
    return tuple(f"[{name}]" if ":" in name else name for name in (*own, *settings.hosts, *certified))


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with bounds on the head of a request and on silent connections."""

    _head_bytes = 0
    _in_head = True  # or between two requests
    _one_is_over = False
    _waiting: TimerHandle | None = None
    _quiet_since = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override] # as uvicorn's own
        """Give the connection some time to say something, and end another one where there are too many."""
        super().connection_made(transport)
        self._quiet_since = next(_turns)
        self._wait_for_head()
        if len(self.connections) > connections_max():
            # The longest quiet one goes; this one itself when on all others something is under way.
            there = (one for one in self.connections if isinstance(one, BoundedProtocol) and not one.is_closing)
            min(there, key=lambda one: (one.quiet_since, one is self)).transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._heard()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Count from here."""
        self._head_bytes, self._in_head = 0, True
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Count no more."""
        self._in_head = False
        self._heard()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Take bytes, unless they are the head of a request that is longer than any may be."""
        was_in_head, self._one_is_over = self._in_head, False
        super().data_received(data)
        if was_in_head and self._in_head and not self._one_is_over:  # else the head began somewhere in these bytes
            self._head_bytes += len(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
            self.transport.close()

    def on_message_complete(self) -> None:
        """Count what comes between two requests, too."""
        self._head_bytes, self._in_head, self._one_is_over = 0, True, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note that nothing is under way from now on."""
        self._quiet_since = next(_turns)
        super().on_response_complete()

    @property
    def quiet_since(self) -> float:
        """Return a number that is higher the later the last request was over; no end while one is under way."""
        cycle: RequestResponseCycle | None = self.cycle
        return self._quiet_since if cycle is None or cycle.response_complete else float("inf")

    @property
    def is_closing(self) -> bool:
        """Return whether it is about to go."""
        return self.transport.is_closing()

    def _wait_for_head(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_S, self._said_nothing)

    def _heard(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _said_nothing(self) -> None:
        self.transport.close()


def connections_max() -> int:
    """Return how many connections there may be: what is left of the process's descriptors."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(CONNECTIONS_MAX, max(soft - OTHER_FILES, soft // 2))


def _remembered(host: str, file: Path, first: int) -> socket.socket:
    """Return a socket on the port of last time, else on the first choice, else on any; which is remembered."""
    ports = [first, 0]
    with contextlib.suppress(OSError, ValueError):
        last = int(file.read_text(encoding="ascii"))
        if 0 < last < 65536:
            ports.insert(0, last)
    for port in ports:
        try:
            found = _bound(host, port)
        except ServerProblem:
            continue
        file.write_text(f"{found.getsockname()[1]}\n", encoding="ascii")
        return found
    raise ServerProblem(f"no port is free on {host}")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ServerProblem(
                f"port {port} of {host} cannot be used: {error.strerror}", hint="give another one with --port"
            ) from error
        raise InvalidValue(f"{host} is no address of this machine: {error}", hint="give one with --host") from error
    return made


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _is_unspecified(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False
