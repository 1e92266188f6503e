"""Opens the server's listening sockets, limits connections, and locks the home directory.

    lock     server.lock and server/lock, held until the process ends. The locks prevent a second server of the home.
             Servers of one PostgreSQL may share server/. The database then decides which server works
             (`leader_lock.py`).
    port     The configured port, else the last port (server/port), else 7878, else any free port. The server stores
             the port for the next start.
    beside   A second socket on loopback, without TLS, if the main socket is not plain HTTP on loopback. This machine's
             own node and clients use this socket, so that they need no host name and no certificate.
    protocol uvicorn's protocol with three more bounds: on the length and duration of headers, on silent
             connections, and on the number of connections. The last bound keeps the server from running out of
             descriptors. Over the limit, the server closes the connection with the longest idle time.

Without a configured port, the server reuses its last port, so that existing clients find the restarted server.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import itertools
import os
import re
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
"""Maximum bytes of a request line with its headers. `AuthMiddleware` has a lower limit."""
HEAD_S = 20.0
"""Timeout in seconds for the first byte and for the headers of a request."""
CONNECTIONS_MAX = 10_000
OTHER_FILES = 256
"""File descriptors reserved for the database, logs and uploads."""
_turns = itertools.count()

_HINT = "show the running server with `sgpu status`, or set another SERVERLESS_GPU_HOME for a second server"


@contextlib.contextmanager
def lock_server(directory: Path, *, may_share: bool = False) -> Iterator[str]:
    """Lock a server's home directory and state directory.

    Args:
        directory: the server's directory.
        may_share: True if a process of another home may hold the directory's lock. The other process may be paused. The
            database then decides if this process replaces it.

    Yields:
        A description of the process that holds the directory's lock, or "".
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
    """Lock a home directory, so that no other server uses the directory."""
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
                f"a server of this home is already running{': ' + said if said else ''}",
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
    """Listening sockets of a server.

    Attributes:
        main: socket for all clients.
        beside: plain HTTP socket on loopback for this machine; None if `main` is already such a socket.
    """

    main: socket.socket
    beside: socket.socket | None

    def close(self) -> None:
        """Close both sockets."""
        self.main.close()
        if self.beside is not None:
            self.beside.close()


def bind_sockets(settings: Settings) -> ListeningSockets:
    """Open a server's listening sockets.

    Raises:
        ServerProblem: the configured port is taken.
        InvalidValue: this machine lacks the address, or tokens would cross a network unencrypted.
    """
    is_safe = bool(settings.tls_cert or settings.behind_proxy)
    if not is_safe and not is_loopback(settings.host):
        raise InvalidValue(
            f"a server that listens on {settings.host} would send tokens across the network unencrypted",
            hint="set a certificate with --tls-cert and --tls-key. Or listen on loopback behind a TLS proxy, "
            "with its name in --allow-host. Or name the TLS proxy's address: --behind-proxy ADDRESS",
        )
    if settings.port is not None:
        main = bound_socket(settings.host, settings.port)
    else:
        main = _remembered(settings.host, settings.directory / "port", PORT)
    if not settings.tls_cert and (is_loopback(settings.host) or _is_unspecified(settings.host)):
        return ListeningSockets(main, None)
    try:
        return ListeningSockets(main, _remembered("127.0.0.1", settings.directory / "port.here", PORT + 1))
    except ServerProblem:
        main.close()
        raise


def url_of(settings: Settings, listening: ListeningSockets) -> str:
    """Return the server's plain HTTP address on the loopback interface."""
    if listening.beside is not None:
        return f"http://127.0.0.1:{listening.beside.getsockname()[1]}"
    host = settings.host
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.main.getsockname()[1]}"


def host_names(settings: Settings, certified: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the server's host names without loopback names."""
    own = () if _is_unspecified(settings.host) else (settings.host,)
    return tuple(f"[{name}]" if ":" in name else name for name in (*own, *settings.hosts, *certified))


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits for request headers and idle connections."""

    _head_bytes = 0
    _in_head = True  # Also True between two requests.
    _one_is_over = False
    _waiting: TimerHandle | None = None
    _quiet_since = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override] # uvicorn's signature
        """Start the request timer, and close an idle connection if the server has too many connections."""
        super().connection_made(transport)
        self._quiet_since = next(_turns)
        self._wait_for_head()
        if len(self.connections) > connections_max():
            # Close the longest idle connection. If all connections are busy, close the new connection.
            there = (one for one in self.connections if isinstance(one, BoundedProtocol) and not one.is_closing)
            min(there, key=lambda one: (one.quiet_since, one is self)).transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._heard()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Start counting the bytes of the request headers."""
        self._head_bytes, self._in_head = 0, True
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop counting bytes at the end of the request headers."""
        self._in_head = False
        self._heard()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Process received bytes, and close the connection if the request headers are too long."""
        was_in_head, self._one_is_over = self._in_head, False
        super().data_received(data)
        # Do not count received bytes that contain the start of a request.
        if was_in_head and self._in_head and not self._one_is_over:
            self._head_bytes += len(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
            self.transport.close()

    def on_message_complete(self) -> None:
        """Start counting bytes between two requests."""
        self._head_bytes, self._in_head, self._one_is_over = 0, True, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Record the time at which the connection became idle."""
        self._quiet_since = next(_turns)
        super().on_response_complete()

    @property
    def quiet_since(self) -> float:
        """Return the end of the last request as a sequence number, or infinity during a request."""
        cycle: RequestResponseCycle | None = self.cycle
        return self._quiet_since if cycle is None or cycle.response_complete else float("inf")

    @property
    def is_closing(self) -> bool:
        """Return True if the connection is closing."""
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
    """Return the maximum number of connections within the process's descriptor limit."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(CONNECTIONS_MAX, max(soft - OTHER_FILES, soft // 2))


def _remembered(host: str, file: Path, first: int) -> socket.socket:
    """Open a socket on the stored port, the preferred port or any free port, and store the port."""
    ports = [first, 0]
    with contextlib.suppress(OSError, ValueError):
        last = int(file.read_text(encoding="ascii"))
        if 0 < last < 65536:
            ports.insert(0, last)
    for port in ports:
        try:
            found = bound_socket(host, port)
        except ServerProblem:
            continue
        file.write_text(f"{found.getsockname()[1]}\n", encoding="ascii")
        return found
    raise ServerProblem(f"no port is free on {host}")


def bound_socket(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """Open a listening socket.

    Args:
        host: address of this machine.
        port: port; 0 for any free port.
        option: option that sets the port, for the message.

    Raises:
        ServerProblem: the port is taken.
        InvalidValue: the address is not one of this machine.
    """
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
                f"the server cannot use port {port} of {host}: {error.strerror}",
                hint=f"choose another port with {option}",
            ) from error
        raise InvalidValue(
            f"{host} is not an address of this machine: {error}",
            hint=f"set an address of this machine with {'--host' if option == '--port' else option}",
        ) from error
    return made


def is_loopback(host: str) -> bool:
    """Return True for a loopback address or `localhost`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _is_unspecified(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def lock_holder(directory: Path) -> int | None:
    """Return the process ID of the server in a state directory, or None without a running server."""
    try:
        fd = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        match = re.fullmatch(r"process (\d+)", os.pread(fd, 200, 0).decode("utf-8", "replace").strip())
        return int(match[1]) if match is not None else None
    finally:
        os.close(fd)
    return None
