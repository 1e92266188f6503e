"""Connections that say little or nothing, by the hundred: they cost a bound, and everybody else is served."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from serverless_gpu.server.http import listener
from serverless_gpu.wire.server_status import Health
from tests.support.local.observe import wait_for
from tests.support.server.served import Served

WITHIN_S = 60.0


def _connected(server: Served) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=WITHIN_S)


@pytest.fixture
def crowd(server: Served) -> Iterator[Callable[[int], list[socket.socket]]]:
    """Return what makes connections that are closed with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda count: [stack.enter_context(contextlib.closing(_connected(server))) for _ in range(count)]


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_beyond_the_bound_the_one_that_was_quiet_for_longest_goes(
    server: Served, crowd: Callable[[int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "connections_max", lambda: 20)
    asked = server.connection()
    assert asked.ask("GET", "/health", answer=Health).ok
    quiet = crowd(60)
    assert asked.ask("GET", "/health", answer=Health).ok
    for first in quiet[:40]:
        assert _is_closed(first)
    assert server.connection().ask("GET", "/health", answer=Health).ok
    quiet[-1].sendall(b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert quiet[-1].recv(15) == b"HTTP/1.1 200 OK"


def test_a_request_that_is_under_way_is_never_ended_for_a_new_connection(
    server: Served, crowd: Callable[[int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "connections_max", lambda: 3)
    busy = crowd(3)
    head = f"POST /api/v1/users HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\n"
    for one in busy:
        one.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 20\r\n\r\n".encode())
    host = server.url.removeprefix("http://")

    def refused() -> bool:
        (newcomer,) = crowd(1)
        newcomer.sendall(f"GET /api/v1/health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        return _is_closed(newcomer)

    wait_for(refused, "there is no room", WITHIN_S)
    for number, one in enumerate(busy):
        one.sendall(f'{{"name":"someone{number}"}}'.encode().ljust(20))
        assert one.recv(15) == b"HTTP/1.1 200 OK"


def test_the_headers_of_a_later_request_have_to_come_in_time_as_those_of_the_first(
    server: Served, crowd: Callable[[int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_S", 0.3)
    (slow,) = crowd(1)
    slow.sendall(b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert slow.recv(15) == b"HTTP/1.1 200 OK"
    slow.sendall(b"GET /api/v1/health HTTP/1.1\r\nHost: 127")

    def gone() -> bool:
        try:
            slow.sendall(b"0")
        except OSError:
            return True
        return False

    wait_for(gone, "it was closed", WITHIN_S)


def test_a_request_that_is_larger_than_any_head_and_comes_at_once_is_no_long_head(
    server: Served, crowd: Callable[[int], list[socket.socket]]
) -> None:
    body = b'{"name":"x","kind":"none"}'.ljust(2 * listener.HEAD_BYTES_MAX)
    head = f"POST /api/v1/users HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\n"
    (one,) = crowd(1)
    for _ in range(3):
        one.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = one.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 400") and b"none" in answer


def test_there_are_descriptors_left_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(soft: int) -> int:
        monkeypatch.setattr("resource.getrlimit", lambda _which: (soft, soft))
        return listener.connections_max()

    assert [limited(soft) for soft in (256, 1024, 65_536)] == [128, 768, 10_000]
