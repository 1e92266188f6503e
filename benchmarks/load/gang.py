"""One run with thousands of ranks, on a node that is played by hand: what a result of 10,000 ranks takes.

A client waits for the run on its stream, as a blocking call does; the node reports as the uplink does: 1,000 files of
results in a body, and output of many ranks in one. Timed is from the first result that is sent until the client has
the run's end, with the names of all results and the first MiB of them; the others it reads one by one, as
`Run.results` does.
"""

from __future__ import annotations

import threading
import time

import msgspec

from benchmarks.contestants import ContestantFailed
from benchmarks.load.asking import Asker
from benchmarks.load.probe import request
from benchmarks.load.servers import MeasuredServer
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.version import __version__
from serverless_gpu.wire.agents import (
    AgentHello,
    AgentWelcome,
    Ending,
    File,
    LogPiece,
    Order,
    Report,
    ReportAnswer,
    Start,
)
from serverless_gpu.wire.base import PROTOCOL
from serverless_gpu.wire.runs import EndedMessage, RunView, SettledMessage, StreamMessage

FILES_AT_ONCE = 1_000
PIECES_AT_ONCE = 5_000
_LINE = b"a line of output of one of ten thousand ranks\n"
_RESULT = b"\x80\x04" + b"x" * 198
_WAIT_S = 300.0


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What one run took: milliseconds, and the largest bodies that went either way, MB.

    Attributes:
        fetched_ms: until the client had every result in its hands.
    """

    ms: float
    fetched_ms: float
    logs_ms: float
    sent_mb: float
    event_mb: float


class _Client(threading.Thread):
    """Waits for a run on its stream."""

    def __init__(self, server: MeasuredServer, run_id: str) -> None:
        super().__init__(daemon=True)
        self._asker, self._again, self._run_id = server.asker(), server.asker(), run_id
        self.largest = self.results = 0
        self.ended_ns = self.fetched_ns = 0

    def run(self) -> None:
        """Read until the receipt."""
        for event in self._asker.events(f"/runs/{self._run_id}/events"):
            self.largest = max(self.largest, len(event))
            message = msgspec.json.decode(event, type=StreamMessage) if event else None
            if isinstance(message, EndedMessage):
                self.ended_ns = time.perf_counter_ns()
                self._fetch(message)
                self.fetched_ns = time.perf_counter_ns()
            if isinstance(message, SettledMessage):
                return

    def _fetch(self, ended: EndedMessage) -> None:
        for file in ended.files:
            if file.inline is None:
                status, data = self._again.ask("GET", f"/runs/{self._run_id}/files/{file.name}?fence={ended.fence}")
                self.results += status == 200 and data == _RESULT
            else:
                self.results += file.inline == _RESULT


def play(server: MeasuredServer, ranks: int, *, name: str) -> Played:
    """Let a run with so many ranks begin, write, return and end.

    Raises:
        ContestantFailed: its results did not arrive.
    """
    node = server.asker(server.node_token(name))
    welcome = node.get("POST", "/agents", _hello(name, ranks), answer=AgentWelcome)
    asked = request(f"machine-{name}", gpus=ranks)
    run = server.asker().get("POST", "/runs", asked, answer=RunView)
    client = _Client(server, run.id)
    client.start()
    start = _order(node, welcome.node)
    reporter = _Reporter(server.asker(start.token), start)
    reporter.say(Report(state=State.RUNNING, world_size=ranks, exec_ns=time.time_ns()))
    began_ns = time.perf_counter_ns()
    for first in range(0, ranks, PIECES_AT_ONCE):
        some = range(first, min(first + PIECES_AT_ONCE, ranks))
        pieces = tuple(LogPiece(rank=rank, stream="stdout", offset=0, data=_LINE) for rank in some)
        reporter.say(Report(state=State.RUNNING, logs=pieces))
    logs_ms = (time.perf_counter_ns() - began_ns) / 1e6
    began_ns = time.perf_counter_ns()
    for first in range(0, ranks, FILES_AT_ONCE):
        some = range(first, min(first + FILES_AT_ONCE, ranks))
        files = tuple(File(name=f"results/{rank}.pkl", size=len(_RESULT), inline=_RESULT) for rank in some)
        last = first + FILES_AT_ONCE >= ranks
        reporter.say(Report(state=State.STOPPING, files=files, ending=_ending() if last else None))
    reporter.say(Report(state=State.STOPPING, receipt=msgspec.Raw(b"{}")))
    client.join(_WAIT_S)
    if client.results != ranks:
        raise ContestantFailed(f"{client.results} of {ranks} results arrived within {_WAIT_S:.0f} s")
    return Played(
        ms=(client.ended_ns - began_ns) / 1e6,
        fetched_ms=(client.fetched_ns - began_ns) / 1e6,
        logs_ms=logs_ms,
        sent_mb=reporter.largest / 1e6,
        event_mb=client.largest / 1e6,
    )


class _Reporter:
    """Reports about one attempt."""

    def __init__(self, asker: Asker, start: Start) -> None:
        self._asker = asker
        self._path = f"/attempts/{start.run_id}/{start.fence}/report"
        self.largest = 0

    def say(self, report: Report) -> None:
        self.largest = max(self.largest, len(msgspec.json.encode(report)))
        answer = self._asker.get("POST", self._path, report, answer=ReportAnswer)
        if answer.stale:
            raise ContestantFailed("the run is over for the server")


def _order(node: Asker, node_id: str) -> Start:
    for event in node.events(f"/agents/{node_id}/orders"):
        order = msgspec.json.decode(event, type=Order) if event else None
        if isinstance(order, Start):
            return order
    raise ContestantFailed("the stream of orders ended")


def _ending() -> Ending:
    stopped = Stopped(state=State.SUCCEEDED, reason=Reason.COMPLETED, cause=None, consequences=())
    raw = msgspec.Raw(msgspec.json.encode(stopped))
    return Ending(state=State.SUCCEEDED, reason=Reason.COMPLETED, began=True, stopped=raw)


def _hello(name: str, devices: int) -> AgentHello:
    return AgentHello(
        name=name,
        machine=f"machine-{name}",
        boot_id=f"{name}-boot",
        version=__version__,
        protocol=PROTOCOL,
        python="3.11",
        platform="linux-x86_64",
        devices=tuple(
            Device(uuid=f"FAKE-{name}-{number}", index=number, type="H100", memory_bytes=80 << 30, kind=DeviceKind.FAKE)
            for number in range(devices)
        ),
    )
