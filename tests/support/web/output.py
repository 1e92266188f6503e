"""A run that writes what a test says: output of ranks and telemetry of a node, over HTTP as a real node sends it.

run = OutputRun(server, ranks=2)
run.write(b"hello\\n", rank=1)
run.measure(600)                 ten minutes of samples of two GPUs
run.end()
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

import msgspec

from serverless_gpu.ambient import SystemClock, machine, new_run_id
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.model.telemetry import GpuSample, Header, HostSample, RankSample, Sample, Sampled, encode
from serverless_gpu.wire.agents import Ending, File, LogPiece, Report
from serverless_gpu.wire.runs import RunRequest, RunView, Target
from tests.support.server.played import Played
from tests.support.server.served import Served

Stream = Literal["stdout", "stderr", "telemetry"]
_PIECE_BYTES = 900_000
_GB = 10**9


class OutputRun:
    """A run on a played node.

    Args:
        server: it runs there.
        token: of its owner, the administrator's unless another is given.
        ranks: how many.
        name: of the run.
        retries: how often it may fail and begin again.
    """

    def __init__(
        self,
        server: Served,
        *,
        token: str | None = None,
        ranks: int = 1,
        name: str = "train",
        retries: int = 0,
    ) -> None:
        self.id = new_run_id()
        self._ranks = ranks
        self._has_ended = False
        self._offsets: Counter[tuple[int, str]] = Counter()
        asked = RunRequest(
            id=self.id,
            spec=RunSpec(remote=True, name=name, resources=Resources(gpus=ranks, gpu_type="CPU"), retries=retries),
            target=Target(machine=machine(), python="3.11", platform="linux-x86_64"),
            context=msgspec.Raw(b"{}"),
            call=b"call",
        )
        self._node = Played(server, slots=max(4, ranks))
        self._node.join()
        server.connection(token).ask("POST", "/runs", asked, answer=RunView)
        self._begin()

    def _begin(self) -> None:
        self._offsets.clear()
        self._start = self._node.order()
        begun = Report(state=State.RUNNING, world_size=self._ranks, exec_ns=SystemClock().wall_ns())
        self._node.report(self._start, begun)

    def fail_and_retry(self) -> None:
        """End the attempt with a failure, and begin the next one."""
        self.end(State.FAILED, Reason.RANK_RAISED)
        self._has_ended = False
        self._begin()

    def __enter__(self) -> OutputRun:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_ended:
            self.end()

    @property
    def path(self) -> str:
        """Return the path of the run's page."""
        return f"/ui/runs/{self.id}"

    def write(self, data: bytes, *, rank: int = 0, stream: Stream = "stdout") -> int:
        """Write output; return the offset of its first byte."""
        begin = self._offsets[rank, stream]
        for at in range(0, len(data), _PIECE_BYTES):
            part = data[at : at + _PIECE_BYTES]
            piece = LogPiece(rank=rank, stream=stream, offset=self._offsets[rank, stream], data=part)
            self._node.report(self._start, Report(state=State.RUNNING, world_size=self._ranks, logs=(piece,)))
            self._offsets[rank, stream] += len(part)
        return begin

    def measure(self, seconds: int, *, gpus: int = 2, start_ns: int | None = None, gap: range = range(0)) -> None:
        """Send a sample for each second, except those of a gap."""
        self.write(samples(seconds, gpus=gpus, ranks=self._ranks, start_ns=start_ns, gap=gap), stream="telemetry")

    def end(self, state: State = State.SUCCEEDED, reason: Reason = Reason.COMPLETED) -> None:
        """End the run, and hand the devices back."""
        self._has_ended = True
        ending = Ending(state=state, reason=reason, began=True, stopped=msgspec.Raw(b"{}"))
        results = tuple(File(name=f"results/{rank}.pkl", size=1, inline=b"r") for rank in range(self._ranks))
        last = Report(state=State.STOPPING, world_size=self._ranks, files=results, ending=ending)
        self._node.report(self._start, last)
        self._node.report(self._start, Report(state=State.STOPPING, receipt=msgspec.Raw(b'{"receipt":true}')))


def samples(
    seconds: int,
    *,
    gpus: int = 2,
    ranks: int = 1,
    start_ns: int | None = None,
    gap: range = range(0),
    kind: DeviceKind = DeviceKind.GPU,
) -> bytes:
    """Return a telemetry file with a sample for each second. GPU 0 has one peak of 99 % in the middle."""
    begin_ns = SystemClock().wall_ns() - seconds * 10**9 if start_ns is None else start_ns
    devices = tuple(Sampled(f"GPU-{number}", "H100", kind) for number in range(gpus))
    header = Header(run_id="01run", fence=1, node="played", node_rank=0, origin_ns=begin_ns, devices=devices)
    lines = [encode(header)]
    for second in range(seconds):
        if second in gap:
            continue
        wave = math.sin(second / 40)
        measured = tuple(
            GpuSample(
                busy_percent=99.0 if number == 0 and second == seconds // 2 else round(60 + 20 * wave - 5 * number, 1),
                memory_bytes=round((30 + 10 * min(1, second / 60) + number) * _GB),
                memory_total_bytes=80 * _GB,
                power_watts=round(350 + 100 * wave + 10 * number, 1),
                power_limit_watts=700.0,
                temperature_celsius=round(55 + 8 * wave + number, 1),
            )
            for number in range(gpus)
        )
        host = HostSample(cpu_percent=round(40 + 10 * wave, 1), memory_bytes=90 * _GB, memory_total_bytes=256 * _GB)
        ranked = tuple(RankSample(rank, round(90 + 5 * wave, 1), 3 * _GB, 30 * _GB) for rank in range(ranks))
        lines.append(encode(Sample(begin_ns + second * 10**9, host, measured, ranked)))
    return b"".join(lines)
