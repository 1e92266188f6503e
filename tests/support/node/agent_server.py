"""The server as a node sees it, in a thread: it gives orders, and keeps what it is told.

    with AgentServer(home) as server:
        attempt = server.order(spec, call)          an order on the stream, until it is acknowledged
        attempt.wait(lambda: attempt.ending)        what reports said

Several nodes may join, each with a home of its own: `node1`, `node2` … in the order in which they come. What a gang on
several of them is told is played in `gangs.py`.

`away` lets every request fail, `stop()` and `start()` are a restart on the same port; what was told stays. Reports are
taken as a real server takes them: logs by offset, files by name, anything twice.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from blake3 import blake3

from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.uplink.server import UplinkProfile, write_profile
from serverless_gpu.wire.agents import (
    AgentHello,
    AgentWelcome,
    Ending,
    File,
    Heartbeat,
    HeartbeatAnswer,
    Order,
    OrdersTaken,
    Report,
    ReportAnswer,
    SessionAnswer,
    SessionChallenge,
    Start,
    Stop,
)
from serverless_gpu.wire.base import API, Problem
from serverless_gpu.wire.blobs import DigestList
from tests.support.local.observe import wait_for

TOKEN = "sgpu_of_the_agent"
SESSION = "sgpn_of_the_agent"


class SeenAttempt:
    """What the server knows of one attempt."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.reports: list[Report] = []
        self.logs: dict[str, bytes] = {}
        self.files: dict[str, File] = {}
        self.facts: dict[int, str] = {}
        self.ending: Ending | None = None
        self.endings = 0
        self.receipt: dict[str, Any] | None = None
        self.stale = False
        self.disk_full = False  # for what ranks print
        self.no_room = False  # for anything
        self.over = False  # what it did is taken, and it does not go on
        self.asked = 0  # reports that came, whatever became of them
        self.stop: StopReason | None = None
        self.token = start.token
        self.next_token = ""  # what a report is answered with

    @property
    def reason(self) -> Reason | None:
        """Return why it ended."""
        return None if self.ending is None else self.ending.reason

    @property
    def states(self) -> list[State]:
        """Return the states that were reported, each once in a row."""
        states = [report.state for report in self.reports]
        return [state for place, state in enumerate(states) if place == 0 or states[place - 1] is not state]

    def settled(self) -> SeenAttempt:
        """Wait until it has a receipt."""
        wait_for(lambda: self.receipt is not None, f"attempt {self.start.run_id} is settled")
        return self

    def running(self) -> SeenAttempt:
        """Wait until user code runs."""
        wait_for(lambda: self.reports and self.reports[-1].state is State.RUNNING, "user code runs")
        return self

    def take(self, report: Report) -> ReportAnswer:
        """Take a report as a server does."""
        wanted = {}
        for piece in report.logs:
            key = f"{piece.rank}.{piece.stream}"
            have = self.logs.get(key, b"")
            if self.disk_full:
                if report.ending is None and self.ending is None:  # after that it says what is missing, and wants none
                    wanted[key] = len(have)
                continue
            if piece.offset <= len(have):
                have += piece.data[len(have) - piece.offset :]
                self.logs[key] = have
            if piece.offset + len(piece.data) != len(have):
                wanted[key] = len(have)
        self.files.update({file.name: file for file in report.files})
        self.facts.update({fact.seq: fact.kind.value for fact in report.facts})
        self.reports.append(report)
        if report.ending is not None:
            self.ending = report.ending
            self.endings += 1
        if report.receipt:
            self.receipt = json.loads(bytes(report.receipt))
        token, self.next_token = self.next_token, ""
        self.token = token or self.token
        return ReportAnswer(
            offsets=wanted,
            stop=self.stop,
            heartbeat_s=1.0,
            partition_grace_s=self.start.partition_grace_s,
            token=token,
            stale=self.over,
        )


class AgentServer:
    """The server.

    Args:
        home: where the profile is written.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.profile = home / "server" / "uplink.json"
        self.profile.parent.mkdir(mode=0o700, exist_ok=True)
        self.sessions = 0
        self.hellos: list[AgentHello] = []
        self.heartbeats: list[Heartbeat] = []
        self.attempts: dict[str, SeenAttempt] = {}
        self.parts: dict[str, bytes] = {}
        self.acknowledged: set[int] = set()
        self.acknowledgements = 0
        self.away = False
        self.refuse_parts = False
        self.refused = 0  # requests with a token that is not good any more
        self.hold_reports = threading.Event()
        self.hold_reports.set()
        self.nodes: dict[str, str] = {}  # instance → identifier
        self._by_token: dict[str, SeenAttempt] = {}
        self._orders: dict[int, tuple[str, Order]] = {}
        self._streams: list[tuple[str, queue.SimpleQueue[bytes | None]]] = []
        self._lock = threading.Lock()
        self._port = 0
        self._http: _Server | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> AgentServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold_reports.set()
        self.stop()

    def start(self, *, port: int | None = None) -> None:
        """Listen, on the same port as before, and write the profile."""
        server = self

        class Handler(_Handler):
            owner = server

        self._http = _Server(("127.0.0.1", self._port if port is None else port), Handler)
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.write_profile()

    def write_profile(self, path: Path | None = None, **changes: Any) -> None:
        """Write how this server is reached."""
        write_profile(path or self.profile, UplinkProfile(url=f"http://127.0.0.1:{self._port}", token=TOKEN, **changes))

    def stop(self) -> None:
        """Close the port and every connection."""
        if self._http is None:
            return
        with self._lock:
            for _, stream in self._streams:
                stream.put(None)
        self._http.shutdown()
        self._http.server_close()
        self._http.break_all()
        assert self._thread is not None
        self._thread.join(10)
        self._http = None

    # --- what it wants -------------------------------------------------------------------------------------------

    def order(
        self, spec: RunSpec, call: bytes | None, context: bytes, *, world_size: int = 1, **changes: Any
    ) -> SeenAttempt:
        """Order the node to start an attempt."""
        run_id = changes.pop("run_id", "") or new_run_id()
        fence = changes.pop("fence", 1)
        start = Start(
            seq=self.next_seq(),
            run_id=run_id,
            fence=fence,
            token=f"sgpa_{run_id}_{fence}",
            spec=spec,
            gpu_type=changes.pop("gpu_type", "H100"),
            world_size=world_size,
            context=msgspec.Raw(context),
            call=call,
            submitted_ns=SystemClock().wall_ns(),
            **changes,
        )
        attempt = self.attempts[f"{run_id}/{fence}"] = SeenAttempt(start)
        self.send(start)
        return attempt

    def next_seq(self) -> int:
        """Return the number of the next order."""
        return len(self._orders) + 1

    def expect(self, attempt: SeenAttempt) -> None:
        """Take reports with a token of its own for this attempt, or crew."""
        self._by_token[f"Bearer {attempt.token}"] = attempt

    def again(self, attempt: SeenAttempt) -> None:
        """Send an order once more."""
        self.send(attempt.start)

    def order_stop(self, attempt: SeenAttempt, reason: StopReason, *, released: bool = False) -> None:
        """Order the node to stop an attempt."""
        start = attempt.start
        seq = self.next_seq()
        self.send(Stop(seq=seq, run_id=start.run_id, fence=start.fence, reason=reason, released=released))

    def send(self, order: Order, node: str = "node1") -> None:
        """Give a node an order; one to look is not kept."""
        with self._lock:
            if order.seq:
                self._orders[order.seq] = node, order
            for whose, stream in self._streams:
                if whose == node:
                    stream.put(_event(order))

    # --- what it is told -----------------------------------------------------------------------------------------

    def stream(self, node: str) -> queue.SimpleQueue[bytes | None]:
        """Return a node's stream of orders, those not acknowledged first."""
        stream: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with self._lock:
            for seq, (whose, order) in self._orders.items():
                if seq not in self.acknowledged and whose == node:
                    stream.put(_event(order))
            self._streams.append((node, stream))
        return stream

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, bytes]:
        """Return status and body for a request."""
        if path == "/agents/challenge":
            return _fine(SessionChallenge(challenge="challenge"))
        if path == "/agents/session":
            self.sessions += 1
            return _fine(SessionAnswer(token=SESSION, lifetime_s=3600.0))
        if path == "/agents":
            assert token == f"Bearer {SESSION}"
            hello = msgspec.json.decode(body, type=AgentHello)
            self.hellos.append(hello)
            node = self.nodes.setdefault(hello.instance, f"node{len(self.nodes) + 1}")
            return _fine(AgentWelcome(node=node, heartbeat_s=1.0, partition_grace_s=60.0))
        if path.endswith("/heartbeat"):
            beat = msgspec.json.decode(body, type=Heartbeat)
            self.heartbeats.append(beat)
            return _fine(
                HeartbeatAnswer(tokens={gang: self.attempts[gang.replace(":", "/")].token for gang in beat.renew})
            )
        if path.endswith("/orders/ack"):
            self.acknowledgements += 1
            self.acknowledged.update(msgspec.json.decode(body, type=OrdersTaken).seqs)
            return 204, b""
        if path.startswith("/attempts/"):
            return self._attempt(path, body, token)
        if path == "/blobs/missing":
            asked = msgspec.json.decode(body, type=DigestList).digests
            return _fine(DigestList(digests=tuple(digest for digest in asked if digest not in self.parts)))
        if path.startswith("/blobs/") and method == "PUT":
            return self._part(path.removeprefix("/blobs/"), body)
        return 404, msgspec.json.encode(Problem(code="not_found", message=f"there is no {path}"))

    def _attempt(self, path: str, body: bytes, token: str) -> tuple[int, bytes]:
        _, _, run_id, fence, what, *rest = path.split("/")
        attempt = self._by_token.get(token) or self.attempts[f"{run_id}/{fence}"]
        if token != f"Bearer {attempt.token}":
            self.refused += 1
            return 401, msgspec.json.encode(Problem(code="not_authenticated", message="the attempt's token has ended"))
        if what == "blobs":
            return 200, self.parts[rest[0]]
        self.hold_reports.wait(60)
        report = msgspec.json.decode(body, type=Report)
        attempt.asked += 1
        if attempt.no_room:
            return 503, msgspec.json.encode(Problem(code="storage_full", message="the database has no room"))
        if attempt.stale:
            return 409, msgspec.json.encode(Problem(code="stale_attempt", message="a newer attempt runs"))
        return _fine(attempt.take(report))

    def _part(self, digest: str, body: bytes) -> tuple[int, bytes]:
        if self.refuse_parts:
            return 503, msgspec.json.encode(Problem(code="server_unavailable", message="the store answers 500"))
        assert blake3(body).hexdigest() == digest
        self.parts[digest] = body
        return 204, b""


def _event(order: Order) -> bytes:
    return b"data: " + msgspec.json.encode(order) + b"\n\n"


def _fine(value: msgspec.Struct) -> tuple[int, bytes]:
    return 200, msgspec.json.encode(value)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def break_all(self) -> None:
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break: that is what they are here for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: AgentServer

    def do_GET(self) -> None:
        if self.path.startswith(f"{API}/agents/"):
            self._stream(self.path.removeprefix(f"{API}/agents/").partition("/")[0])
        else:
            self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.owner.away:
            status, content = 503, b"{}"
        else:
            path = self.path.partition("?")[0].removeprefix(API)
            status, content = self.owner.answer(self.command, path, body, self.headers["Authorization"])
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, node: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        stream = self.owner.stream(node)
        self.wfile.write(b": here\n\n")
        while (event := stream.get()) is not None:
            self.wfile.write(event)
