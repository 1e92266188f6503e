"""A server that is told to stop: what it has begun it finishes, what comes is told to come again."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.local.observe import wait_for
from tests.support.server.served import Served, served

BODY = b"x" * 4096


@contextmanager
def half_sent(server: Served) -> Iterator[socket.socket]:
    """Yield a connection on which half of a body has been sent."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = (
            f"PUT /api/v1/blobs/{blake3(BODY).hexdigest()} HTTP/1.1\r\n"
            f"Host: {host}\r\nAuthorization: Bearer {server.token}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {len(BODY)}\r\n\r\n"
        )
        connection.sendall(head.encode() + BODY[: len(BODY) // 2])
        wait_for(lambda: server.busy == 1, "the request has begun")
        yield connection


def status(server: Served, path: str) -> tuple[int, str]:
    """Return the status of an answer, and when to come again; each says which request it answers."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    asking = http.client.HTTPConnection(host, int(port), timeout=30)
    asking.request("GET", f"/api/v1{path}", headers={"Authorization": f"Bearer {server.token}"})
    answer = asking.getresponse()
    answer.read()
    asking.close()
    assert answer.headers.get("SGPU-Request")
    return answer.status, answer.headers.get("Retry-After", "")


def test_F53_requests_that_go_on_finish_and_others_are_told_to_come_again(tmp_path: Path) -> None:
    with served(tmp_path) as server, half_sent(server) as connection:
        server.stop()
        wait_for(lambda: status(server, "/whoami") == (503, "1"), "new requests are refused")
        assert status(server, "/version")[0] == 200
        connection.sendall(BODY[len(BODY) // 2 :])
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 204"), answer
        server.wait_stopped()
    log = (tmp_path / "server" / "server.log").read_text()
    assert "the server cancels" not in log and '"status":503' in log


@pytest.mark.parametrize("again", [False, True])
def test_requests_that_do_not_finish_are_cut_off_in_the_end_or_at_a_second_signal(tmp_path: Path, again: bool) -> None:
    within_s = 600.0 if again else 0.2
    with served(tmp_path, changes={"stopping_s": within_s}) as server, half_sent(server):
        server.stop()
        if again:
            wait_for(lambda: status(server, "/whoami")[0] == 503, "it is stopping")
            server.stop()
        server.wait_stopped()
    assert "the server cancels" in (tmp_path / "server" / "server.log").read_text()


def test_a_request_that_comes_with_the_signal_is_answered_or_refused_and_never_dropped(tmp_path: Path) -> None:
    seen: set[int] = set()
    over = threading.Event()

    def ask(server: Served) -> None:
        while not over.is_set():
            try:
                seen.add(status(server, "/whoami")[0])
            except ConnectionRefusedError:
                return
            except (http.client.RemoteDisconnected, ConnectionResetError):
                seen.add(0)  # came while the socket closed: nothing of it was begun, and any client asks again
                return

    with served(tmp_path) as server:
        asking = threading.Thread(target=ask, args=(server,))
        with half_sent(server) as connection:
            asking.start()
            wait_for(lambda: 200 in seen, "it answers")
            server.stop()
            wait_for(lambda: 503 in seen, "it refuses")
            connection.sendall(BODY[len(BODY) // 2 :])
            connection.recv(1 << 16)
        server.wait_stopped()
        over.set()
        asking.join(30)
    assert seen <= {200, 503, 0}
