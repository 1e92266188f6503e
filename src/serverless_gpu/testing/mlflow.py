"""A fake MLflow server for tests: it remembers what it was told, and misbehaves as it is asked to.

    with FakeMlflow() as mlflow:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
        ...
        mlflow.behave("hangs")          # from here on, until it is told otherwise
        mlflow.behave("answers")
        assert mlflow.run_of(run_id).series("loss") == [(0, 0.7), (1, 0.5)]

It is a real HTTP server on a port of loopback: other processes can use it, MLflow's own clients among them. It
speaks what runs need: experiments, runs, metrics, parameters, tags, search by one tag, files through the proxy. Like
MLflow it refuses a whole request when one name, value or limit in it is wrong, takes the same point twice as one, and
a parameter only with the value it has.

What `behave` can ask for:

    answers   as MLflow does
    refuses   nobody listens on the port, which stays taken
    hangs     requests are taken and not answered; done, as a real server does, once it behaves otherwise
    loses     requests are done, and the connection is closed before the answer
    fails     500 to everything
    forbids   401 to everything
    foreign   a page of HTML to everything, as a proxy's login page
    slow      answers after a while
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from serverless_gpu.testing.mlflow_store import FakeRun, FakeStore, Refusal

__all__ = ["Behaviour", "FakeMlflow", "FakeRun"]

Behaviour = Literal["answers", "refuses", "hangs", "loses", "fails", "forbids", "foreign", "slow"]

_HANG_S_MAX = 600.0
_BODY_BYTES_MAX = 64 << 20
_PREFIX = "/api/2.0/"
_FILES = "mlflow-artifacts/artifacts/"


class FakeMlflow:
    """One server; start it with ``with``.

    Args:
        slow_s: how long "slow" takes.

    Attributes:
        uri: what ``MLFLOW_TRACKING_URI`` is set to.
        store: what it was told.
        requests: method and path of every request that came in, in order; "hangs" and the like count.
        authorizations: what the ``Authorization`` headers of these said.
    """

    def __init__(self, *, slow_s: float = 0.2) -> None:
        self.uri = ""
        self.store = FakeStore()
        self.requests: list[tuple[str, str]] = []
        self.authorizations: list[str] = []
        self._slow_s = slow_s
        self._port = 0
        self._behaviour: Behaviour = "answers"
        self._only = ""
        self._changed = threading.Condition()
        self._server: _Server | None = None
        self._placeholder: socket.socket | None = None

    def __enter__(self) -> FakeMlflow:
        self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.behave("refuses")
        if self._placeholder is not None:
            self._placeholder.close()

    def behave(self, behaviour: Behaviour, *, only: str = "") -> None:
        """Behave like that from now on.

        Args:
            behaviour: one of those above.
            only: part of the paths for which it holds, "" for all; everything else is answered.
        """
        with self._changed:
            self._behaviour, self._only = behaviour, only
            self._changed.notify_all()
        if behaviour == "refuses":
            self._close()
        elif self._server is None:
            self._listen()

    @property
    def runs(self) -> list[FakeRun]:
        """Return all runs, oldest first."""
        return list(self.store.runs.values())

    def run_of(self, run_id: str) -> FakeRun:
        """Return the one run that is tagged as ours.

        Raises:
            AssertionError: there is none, or more than one.
        """
        found = [run for run in self.runs if run.tags.get("sgpu.run_id") == run_id]
        if len(found) != 1:
            raise AssertionError(f"{len(found)} MLflow runs carry the tag sgpu.run_id={run_id}, not 1")
        return found[0]

    def wait(self, condition: Callable[[FakeMlflow], bool], timeout_s: float = 30.0) -> None:
        """Wait until something holds; it is looked at after every request.

        Args:
            condition: what is waited for.
            timeout_s: how long at most.

        Raises:
            AssertionError: it does not hold by then.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout_s):
                raise AssertionError(f"it did not happen in {timeout_s:g} s; requests were {self.requests[-20:]}")

    # --- below ------------------------------------------------------------------------------------------------------

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> _Reply | None:
        """Return what is sent back for a request, or None when the connection is to be closed.

        Args:
            method: of the request.
            target: path and query.
            headers: those of the request.
            body: what came with it.
        """
        path = urlsplit(target).path
        with self._changed:
            self.requests.append((method, path))
            self.authorizations.append(headers.get("Authorization", ""))
            self._changed.notify_all()
            behaviour = self._of(path)
            if behaviour == "hangs":
                self._changed.wait_for(lambda: self._of(path) != "hangs", _HANG_S_MAX)
                behaviour = self._of(path)
            elif behaviour == "slow":
                self._changed.wait_for(lambda: self._of(path) != "slow", self._slow_s)
            if behaviour == "refuses":
                return None
            if behaviour == "fails":
                return _Reply(500, {"error_code": "INTERNAL_ERROR", "message": "the fake was asked to fail"})
            if behaviour == "forbids":
                return _Reply(401, "You are not authenticated.")
            if behaviour == "foreign":
                return _Reply(200, "<html><body>Please sign in.</body></html>")
            reply = self._done(method, target, body)
            self._changed.notify_all()
            return None if behaviour == "loses" else reply

    def _of(self, path: str) -> Behaviour:
        return self._behaviour if self._only in path else "answers"

    def _done(self, method: str, target: str, body: bytes) -> _Reply:
        parts = urlsplit(target)
        if parts.path in ("/health", "/version"):
            return _Reply(200, "OK" if parts.path == "/health" else "3.17.2")
        name = parts.path.removeprefix(_PREFIX)
        try:
            if name.startswith(_FILES):
                return self._file(method, unquote(name.removeprefix(_FILES)), body)
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            asked: dict[str, Any] = msgspec.json.decode(body) if body else dict(query)
            return _Reply(200, self.store.do(method, name.removeprefix("mlflow/"), asked))
        except Refusal as refusal:
            return _Reply(refusal.status, {"error_code": refusal.code, "message": refusal.message})

    def _file(self, method: str, path: str, body: bytes) -> _Reply:
        if method == "PUT":
            self.store.put_file(path, body)
            return _Reply(200, {})
        return _Reply(200, self.store.file(path))

    def _listen(self) -> None:
        if self._placeholder is not None:
            self._placeholder.close()
            self._placeholder = None
        self._server = _Server(("127.0.0.1", self._port), _handler(self))
        self._port = self._server.server_address[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def _close(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        server.shutdown()
        server.server_close()
        server.hang_up()
        # Bound and not listening: whoever connects is refused, and nobody else gets the port.
        self._placeholder = socket.socket()
        self._placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._placeholder.bind(("127.0.0.1", self._port))


class _Reply:
    def __init__(self, status: int, content: object) -> None:
        self.status = status
        if isinstance(content, bytes):
            self.kind, self.data = "application/octet-stream", content
        elif isinstance(content, str):
            self.kind, self.data = "text/html", content.encode()
        else:
            self.kind, self.data = "application/json", msgspec.json.encode(content)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: whoever asked has gone."""

    def hang_up(self) -> None:
        """Close connections that are kept open for the next request."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _handler(fake: FakeMlflow) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _HANG_S_MAX
        wbufsize = -1  # head and body in one packet: two of them would wait for an acknowledgement, 40 ms

        def _any(self) -> None:
            length = min(int(self.headers.get("Content-Length") or 0), _BODY_BYTES_MAX)
            reply = fake.answer(self.command, self.path, dict(self.headers), self.rfile.read(length))
            if reply is None:
                self.close_connection = True
                return
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.data)))
            self.end_headers()
            self.wfile.write(reply.data)

        do_GET = do_POST = do_PUT = do_PATCH = _any

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    return Handler
