"""The connection to a server, against a server of a few lines on loopback."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from serverless_gpu.errors import NotFound, ServerProblem, ServerUnavailable
from serverless_gpu.model.lifecycle.attempt import State, StopReason
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import SettledMessage, StateMessage, StopRequest
from serverless_gpu.wire.server_status import Health
from tests.support.golden import golden

Answers = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    """Yield a function that serves every request with a function, and returns the address."""
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Answers) -> str:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                answers(self)

            do_PUT = do_POST = do_GET

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(handler: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "application/json") -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def connect() -> Iterator[Callable[..., Connection]]:
    opened: list[Connection] = []

    def make(url: str, **options: object) -> Connection:
        opened.append(Connection(url, "secret", **options))  # type: ignore[arg-type]  # passed through
        return opened[-1]

    yield make
    for connection in opened:
        connection.close()


Serve = Callable[[Answers], str]
Connect = Callable[..., Connection]


def test_a_request_carries_the_token_and_the_answer_is_a_value(serve: Serve, connect: Connect) -> None:
    seen: list[str] = []

    def health(handler: BaseHTTPRequestHandler) -> None:
        seen.append(f"{handler.path} {handler.headers['Authorization']}")
        answer(handler, 200, b'{"ok": true, "later": 1}')

    assert connect(serve(health)).ask("GET", "/health", answer=Health) == Health(ok=True)
    assert seen == ["/api/v1/health Bearer secret"]


def test_a_problem_is_raised_as_the_class_of_its_code(serve: Serve, connect: Connect) -> None:
    body = b'{"code": "not_found", "message": "there is no run x", "hint": "look"}'
    with pytest.raises(NotFound, match=re.escape(golden("client.connection.run"))) as caught:
        connect(serve(lambda handler: answer(handler, 404, body))).ask("GET", "/runs/x", answer=Health)
    assert caught.value.hint == "look"


def test_a_page_of_a_proxy_is_a_problem_with_its_status(serve: Serve, connect: Connect) -> None:
    url = serve(lambda handler: answer(handler, 418, b"<html>tea</html>", "text/html"))
    with pytest.raises(ServerProblem, match=r"418: <html>tea"):
        connect(url).ask("GET", "/health", answer=Health)


def test_an_answer_of_another_language_is_said(serve: Serve, connect: Connect) -> None:
    with pytest.raises(ServerProblem, match="cannot be understood"):
        connect(serve(lambda handler: answer(handler, 200, b"{}"))).ask("GET", "/health", answer=Health)


def test_nobody_listens(connect: Connect) -> None:
    with pytest.raises(ServerUnavailable, match="does not answer"):
        connect("http://127.0.0.1:9").ask("GET", "/health", answer=Health)


def test_F35_a_server_that_is_away_is_waited_for_and_that_is_said_once(serve: Serve, connect: Connect) -> None:
    lines: list[str] = []
    away = threading.Event()

    def come_back(line: str) -> None:
        lines.append(line)
        away.set()

    def sometimes(handler: BaseHTTPRequestHandler) -> None:
        if away.is_set():
            answer(handler, 200, b'{"ok": true}')
        else:
            answer(handler, 503, b"")

    connection = connect(serve(sometimes), patience_s=60.0, announce=come_back)
    assert connection.ask("GET", "/health", answer=Health).ok
    assert len(lines) == 2 and "waiting" in lines[0] and "answers again" in lines[1]


def test_bytes_go_and_come_and_a_range_past_the_end_is_empty(serve: Serve, connect: Connect) -> None:
    kept: dict[str, bytes] = {}

    def store(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "PUT":
            kept[handler.path] = handler.rfile.read(int(handler.headers["Content-Length"]))
            answer(handler, 204, b"")
        elif handler.headers["Range"] == "bytes=2-4":
            answer(handler, 206, kept[handler.path][2:5], "application/octet-stream")
        else:
            answer(handler, 416, b"")

    connection = connect(serve(store))
    connection.put("/blobs/x", memoryview(b"0123456"))
    assert connection.get("/blobs/x", start=2, length=3) == b"234"
    assert connection.get("/blobs/x", start=7) == b""


def test_events_of_a_stream_come_one_by_one_and_a_broken_one_is_said(serve: Serve, connect: Connect) -> None:
    message_1 = StateMessage(seq=1, fence=1, state=State.RUNNING)

    def events(handler: BaseHTTPRequestHandler) -> None:
        assert b"preempt" in handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Content-Length", "100000")  # and then it breaks off
        handler.end_headers()
        handler.wfile.write(b": hello\n\ndata: " + msgspec.json.encode(message_1) + b"\n\n")

    body = StopRequest(reason=StopReason.PREEMPT)
    stream = connect(serve(events)).stream("POST", "/runs/x", body, answer=StateMessage | SettledMessage)
    first = next(stream)
    assert first == message_1
    with pytest.raises(ServerUnavailable):
        next(stream)


def test_a_stream_that_is_refused_raises_what_the_server_says(serve: Serve, connect: Connect) -> None:
    body = b'{"code": "not_found", "message": "there is no run x"}'
    url = serve(lambda handler: answer(handler, 404, body))
    with pytest.raises(NotFound, match=re.escape(golden("client.connection.run"))):
        next(connect(url).stream("GET", "/runs/x/events", answer=StateMessage))
