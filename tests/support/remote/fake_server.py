"""A server whose runs are scripts: what a client hears is written down beforehand, and how the line behaves, too.

    with FakeServer() as server:
        run = server.script(world_size=1)     what the next run does
        run.say(State.RUNNING) ; run.write(0, b"line\\n") ; run.end({"results/0.pkl": …})

It keeps runs across `stop()` and `start()`, like a server that is restarted on the same port.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from blake3 import blake3

from serverless_gpu.ambient import machine
from serverless_gpu.errors import AlreadyFinished, IdempotencyConflict, NotAuthenticated, NotFound, ServerlessGpuError
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import TERMINAL, Reason, State
from serverless_gpu.model.receipt import Receipt, Segments
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.wire.access import PrincipalView
from serverless_gpu.wire.base import API, Problem
from serverless_gpu.wire.blobs import DigestList
from serverless_gpu.wire.runs import (
    AcceptedMessage,
    EndedMessage,
    EstimateView,
    FileView,
    GapMessage,
    LogMessage,
    RunRequest,
    RunView,
    SettledMessage,
    StateMessage,
    StopRequest,
    Target,
)
from serverless_gpu.wire.server_status import Version

TOKEN = "sgpu_test_secret"
_PIECE = 20_000


class Script:
    """One run: what was said of it so far."""

    def __init__(self, *, owner: str = "alice", world_size: int = 1) -> None:
        self.owner = owner
        self.world_size = world_size
        self.request: RunRequest | None = None
        self.events: list[StateMessage | EndedMessage] = []
        self.output: dict[tuple[int, int, str], bytes] = {}
        self.gaps: dict[tuple[int, int, str], tuple[int, int]] = {}
        self.files: dict[str, bytes] = {}
        self.settled: SettledMessage | None = None
        self.fence = 1
        self.stops: list[str] = []
        self.is_deaf = False
        self.changed = threading.Condition()

    def say(self, state: State, sentence: str = "", *, node: str = "n1", tracked: str = "") -> None:
        """Be in a state."""
        with self.changed:
            message = StateMessage(
                seq=len(self.events) + 1,
                fence=self.fence,
                state=state,
                sentence=sentence,
                node=node,
                tracked=tracked,
            )
            self.events.append(message)
            self.changed.notify_all()

    def write(self, rank: int, data: bytes, stream: str = "stdout") -> None:
        """Have a rank write."""
        with self.changed:
            key = (self.fence, rank, stream)
            self.output[key] = self.output.get(key, b"") + data
            self.changed.notify_all()

    def end(
        self,
        files: dict[str, bytes] | None = None,
        *,
        stopped: Stopped | None = None,
        inline_max: int = 1 << 16,
        settle: bool = True,
    ) -> None:
        """End the run."""
        with self.changed:
            self.files = files or {}
            how = stopped or Stopped(state=State.SUCCEEDED, reason=Reason.COMPLETED, cause=None, consequences=())
            views = tuple(
                FileView(name=name, size=len(data), inline=data if len(data) <= inline_max else None)
                for name, data in self.files.items()
            )
            ending = msgspec.Raw(msgspec.json.encode(how))
            self.events.append(
                EndedMessage(
                    seq=len(self.events) + 1,
                    fence=self.fence,
                    state=how.state,
                    reason=how.reason,
                    ending=ending,
                    files=views,
                )
            )
            self.changed.notify_all()
        if settle:
            self.settle(how)

    def settle(self, how: Stopped, *, receipt: bool = True) -> None:
        """Give the devices back."""
        with self.changed:
            made = receipt_of(self.request.id if self.request else "r", how, self.world_size)
            self.settled = SettledMessage(receipt=msgspec.Raw(msgspec.json.encode(made)) if receipt else msgspec.UNSET)
            self.changed.notify_all()

    def view(self, *, deduplicated: bool = False) -> RunView:
        """Return the run as it is."""
        assert self.request is not None
        last = self.events[-1] if self.events else None
        return RunView(
            id=self.request.id,
            name=self.request.spec.name,
            state=last.state if last else State.QUEUED,
            reason=None,
            sentence=last.sentence if last else "",
            fence=self.fence if self.events else 0,
            owner=self.owner,
            team="",
            pool="",
            node="n1" if self.events else "",
            gpu_type="H100",
            world_size=self.world_size,
            created_ns=1,
            started_ns=None,
            ended_ns=None,
            stop=None,
            spec=self.request.spec,
            deduplicated=deduplicated,
        )


def receipt_of(run_id: str, how: Stopped, world_size: int) -> Receipt:
    """Return an account."""
    return Receipt(
        run_id=run_id,
        fence=1,
        state=how.state.value,
        reason=None,
        gpu_type="H100",
        gpus=tuple(f"fake-{number}" for number in range(world_size)),
        kind=DeviceKind.FAKE,
        segments=Segments(),
        gpu_ms=1,
        micros=None,
        currency="USD",
        peak_memory_bytes=None,
        warm=True,
        warm_reason="",
        gate="1 GPU verified free",
        quarantined=(),
        tags={},
        facts=3,
        world_size=world_size,
    )


class FakeServer:
    """The server.

    Attributes:
        scripts: what runs to come do, in order.
        runs: those there were, by id.
        seen: how often which route was asked.
        cut_after: bytes of a stream after which its connection breaks, or None.
        lose: how many answers to `POST /runs` get lost.
        refuse: raised instead of making a run.
        estimate: when any run would start; None for a server that knows no such question.
        refuse_tokens: whether no token is valid any more.
        token: the one that is.
        pause_s: between the messages of a stream.
        makes: a run that is asked for is made once this is set, as it is unless a test clears it.
    """

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.runs: dict[str, Script] = {}
        self.blobs: dict[str, bytes] = {}
        self.seen: Counter[str] = Counter()
        self.queries: list[dict[str, list[str]]] = []
        self.bodies: list[bytes] = []
        self.cut_after: int | None = None
        self.lose = 0
        self.refuse: ServerlessGpuError | None = None
        self.refuse_tokens = False
        self.estimate: EstimateView | None = None
        self.token = TOKEN
        self.pause_s = 0.0
        self.makes = threading.Event()
        self.makes.set()
        self.me = "alice"
        self.machine = machine()
        self.lock = threading.Lock()
        self._streams: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.port}"

    def script(self, *, owner: str = "alice", world_size: int = 1) -> Script:
        """Return what the next run does."""
        made = Script(owner=owner, world_size=world_size)
        self.scripts.append(made)
        return made

    def known(self, run_id: str, *, owner: str = "alice", world_size: int = 1) -> Script:
        """Return a run that somebody else asked for."""
        made = Script(owner=owner, world_size=world_size)
        made.request = RunRequest(
            id=run_id,
            spec=RunSpec(),
            target=Target(python="3.11", platform="linux-x86_64"),
            context=msgspec.Raw(b"{}"),
        )
        self.runs[run_id] = made
        return made

    def start(self) -> None:
        """Listen, on the same port as before."""
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Be killed: nobody listens any more, and every connection breaks."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self.break_streams()

    def break_streams(self) -> None:
        """Break every connection."""
        with self.lock:
            for sock in self._streams:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def opened(self, sock: socket.socket) -> None:
        """Remember a connection."""
        with self.lock:
            self._streams.add(sock)

    def is_down(self) -> bool:
        """Return whether it was stopped."""
        return self._server is None

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.fake.opened(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        route = parts.path.removeprefix(API).strip("/").split("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.fake.lock:
            self.fake.seen[f"{method} {route[0]}{'/' + route[2] if len(route) > 2 else ''}"] += 1
            self.fake.bodies.append(self.body)
        try:
            if self.fake.refuse_tokens or self.headers["Authorization"] != f"Bearer {self.fake.token}":
                raise NotAuthenticated("this token is not valid any more")
            self._route(method, route)
        except ServerlessGpuError as error:
            problem = Problem(code=error.code, message=error.message, hint=error.hint)
            self._send(msgspec.json.encode(problem), error.status)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, method: str, route: list[str]) -> None:
        match method, route:
            case "GET", ["version"]:
                self._send_struct(Version(version="0", protocol=1, machine=self.fake.machine))
            case "GET", ["whoami"]:
                self._send_struct(
                    PrincipalView(name=self.fake.me, kind="user", role="member", teams=(), disabled=False, created_ns=1)
                )
            case "POST", ["runs"]:
                self._make()
            case "POST", ["estimates"] if self.fake.estimate is not None:
                self._send_struct(self.fake.estimate)
            case "GET", ["runs", run_id]:
                self._send_struct(self._run(run_id).view())
            case "GET", ["runs", run_id, "events"]:
                self.fake.queries.append(self.query)
                self._stream(self._run(run_id))
            case "POST", ["runs", run_id, "stop"]:
                self._stop(self._run(run_id))
            case "GET", ["runs", run_id, "files", *name]:
                self._send_range(self._run(run_id).files["/".join(name)])
            case "GET", ["runs", run_id, "logs", rank, stream]:
                self._send_log(self._run(run_id), int(rank), stream)
            case "POST", ["blobs", "missing"]:
                asked = msgspec.json.decode(self.body, type=DigestList).digests
                self._send_struct(DigestList(digests=tuple(d for d in asked if d not in self.fake.blobs)))
            case "PUT", ["blobs", digest]:
                assert blake3(self.body).hexdigest() == digest
                self.fake.blobs[digest] = self.body
                self._send(b"", 204)
            case _:
                raise NotFound(f"no route {method} {'/'.join(route)}")

    def _run(self, run_id: str) -> Script:
        try:
            return self.fake.runs[run_id]
        except KeyError:
            raise NotFound(f"there is no run {run_id}") from None

    def _make(self) -> None:
        request = msgspec.json.decode(self.body, type=RunRequest)
        if self.fake.refuse is not None:
            raise self.fake.refuse
        self.fake.makes.wait(60)
        with self.fake.lock:
            known = self.fake.runs.get(request.id)
            if known is None:
                known = self.fake.scripts.pop(0)
                known.request = request
                self.fake.runs[request.id] = known
                fresh = True
            else:
                fresh = False
                if known.request != request:
                    raise IdempotencyConflict(f"run {request.id} is another one")
            lost = self.fake.lose > 0
            self.fake.lose -= lost
        if lost:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif "event-stream" in self.headers.get("Accept", ""):
            self._stream(known, deduplicated=not fresh)
        else:
            self._send_struct(known.view(deduplicated=not fresh))

    def _stop(self, run: Script) -> None:
        with run.changed:
            if any(event.state in TERMINAL for event in run.events):
                raise AlreadyFinished("it has ended")
            run.stops.append(msgspec.json.decode(self.body, type=StopRequest).reason)
        if len(run.stops) == 1 and not run.is_deaf:
            run.end(stopped=Stopped(state=State.CANCELLED, reason=Reason.CANCELLED, cause=None, consequences=()))
        self._send_struct(run.view())

    # --- answering -----------------------------------------------------------------------------------------------

    def _send_struct(self, value: msgspec.Struct) -> None:
        self._send(msgspec.json.encode(value))

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_range(self, data: bytes) -> None:
        text = self.headers.get("Range")
        if not text:
            return self._send(data)
        start, _, last = text.removeprefix("bytes=").partition("-")
        end = int(last) + 1 if last else len(data)
        self._send(data[int(start) : end], 206)

    def _send_log(self, run: Script, rank: int, stream: str) -> None:
        data = run.output.get((int(self.query["fence"][0]), rank, stream), b"")
        offset, limit = int(self.query["offset"][0]), int(self.query["limit"][0])
        piece = data[offset : offset + limit]
        self._send(piece, 200, {"SGPU-Next-Offset": str(offset + len(piece)), "SGPU-Complete": "1"})

    def _stream(self, run: Script, *, deduplicated: bool = False) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        left = self.fake.cut_after
        for message in self._messages(run, deduplicated=deduplicated):
            data = b"data: " + msgspec.json.encode(message) + b"\n\n"
            if left is not None and len(data) >= left:
                self.wfile.write(data[:left])
                self.wfile.flush()
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return
            left = None if left is None else left - len(data)
            time.sleep(self.fake.pause_s)
            self.wfile.write(data)
            self.wfile.flush()

    def _messages(self, run: Script, *, deduplicated: bool) -> Iterator[Any]:
        after = int(self.query.get("after", ["0"])[0])
        at: dict[tuple[int, int, str], int] = {}
        for item in filter(None, self.query.get("offsets", [""])[0].split(",")):
            place, _, offset = item.partition(":")
            fence, rank, stream = place.split(".")
            at[int(fence), int(rank), stream] = int(offset)
        yield AcceptedMessage(run=run.view(deduplicated=deduplicated))
        while not self.fake.is_down():
            with run.changed:
                events = [event for event in run.events if event.seq > after]
                output, settled = dict(run.output), run.settled
            for event in events:
                if isinstance(event, EndedMessage):
                    yield from _output(run, output, at)
                yield event
                after = event.seq
            yield from _output(run, output, at)
            if settled is not None and after == len(run.events):
                yield settled
                return
            with run.changed:
                if len(run.events) == after and run.output == output and run.settled is settled:
                    run.changed.wait(0.2)


def _output(
    run: Script, output: dict[tuple[int, int, str], bytes], at: dict[tuple[int, int, str], int]
) -> Iterator[LogMessage | GapMessage]:
    for key, data in output.items():
        fence, rank, stream = key
        name: Any = stream
        while at.get(key, 0) < len(data):
            start = at.get(key, 0)
            gap = run.gaps.get(key)
            if gap is not None and gap[0] <= start < gap[1]:
                at[key] = gap[1]
                yield GapMessage(fence=fence, rank=rank, stream=name, offset=start, size=gap[1] - start)
                continue
            end = min(len(data), start + _PIECE, gap[0] if gap is not None and start < gap[0] else len(data))
            at[key] = end
            yield LogMessage(fence=fence, rank=rank, stream=name, offset=start, data=data[start:end])


def until_it_is_said(capsys: pytest.CaptureFixture[str], limit_s: float = 60.0) -> tuple[str, str]:
    """Wait for the line about a server that is away; return what was printed until then."""
    out = err = ""
    deadline = time.monotonic() + limit_s
    while "does not answer" not in err and time.monotonic() < deadline:
        time.sleep(0.02)
        captured = capsys.readouterr()
        out, err = out + captured.out, err + captured.err
    return out, err
