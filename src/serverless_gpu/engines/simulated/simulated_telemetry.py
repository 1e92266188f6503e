"""What simulated nodes sample, and tell MLflow: made-up figures on the way that those of real nodes take.

    SimulatedAgent ──began, seen, ended──▶ Telemetry ─▶ Recording (a file of samples per gang) ─▶ Delivery ─▶ tracker

Samples come at the simulated cluster's seconds. Delivery has its threads as on a node, and the tracker is whatever a
test gives it: `testing.mlflow.FakeMlflow`, or a real MLflow server.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason
from serverless_gpu.model.telemetry import SECOND_NS, GpuSample, Header, HostSample, Sample, Sampled
from serverless_gpu.node.monitor.telemetry_file import Recording
from serverless_gpu.tracking.base import Tracker, TrackerRun
from serverless_gpu.tracking.delivery import DeliveryJob, MlflowDelivery
from serverless_gpu.tracking.metric_points import telemetry_path
from serverless_gpu.wire.agents import Start

_MEMORY_BYTES = 40 << 30
_HOST_BYTES = 256 << 30
_TURN_S = 170  # one swing of the made-up curves


class Telemetry:
    """The telemetry of one simulated node."""

    def __init__(
        self, directory: Path, *, node_rank: int, num_nodes: int, clock: Clock, tracker: Callable[[], Tracker]
    ) -> None:
        self.tracked: dict[str, TrackerRun] = {}
        self._directory = directory
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._clock = clock
        self._tracker = tracker
        self._gangs: dict[tuple[str, int], _Gang] = {}

    def began(self, start: Start, node: str, devices: Sequence[Device]) -> None:
        """Take that user code begins on these devices."""
        directory = self._directory / start.run_id / str(start.fence)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        header = Header(
            run_id=start.run_id,
            fence=start.fence,
            node=node,
            node_rank=self._node_rank,
            origin_ns=start.submitted_ns,
            devices=tuple(Sampled(device.uuid, device.type, device.kind) for device in devices),
        )
        gang = _Gang(Recording(telemetry_path(directory, self._node_rank), header), self._clock.wall_ns())
        self._gangs[start.run_id, start.fence] = gang
        if start.spec.tracker is not None:
            job = DeliveryJob(
                run_id=start.run_id,
                fence=start.fence,
                node_rank=self._node_rank,
                num_nodes=self._num_nodes,
                spec=start.spec,
                called_ns=start.submitted_ns,
            )
            listener = _Listener(self, start.run_id)
            gang.delivery = MlflowDelivery(directory, job, self._tracker(), listener, clock=self._clock)
            gang.thread = threading.Thread(target=gang.delivery.run, name=f"deliver {start.run_id}", daemon=True)
            gang.thread.start()

    def seen(self, run_id: str, fence: int, until_ns: int) -> None:
        """Take a gang's samples of all seconds up to a moment."""
        gang = self._gangs.get((run_id, fence))
        while gang is not None and gang.next_ns <= until_ns:
            gang.recording.append(_sample(gang.next_ns, gang.recording.header, self._node_rank))
            gang.next_ns += SECOND_NS

    def ended(self, run_id: str, fence: int, reason: Reason) -> None:
        """Take that a gang has ended, and its devices are free."""
        gang = self._gangs.get((run_id, fence))
        if gang is not None:
            gang.recording.flush()
            if gang.delivery is not None:
                gang.delivery.ending(MEANINGS[reason].state, reason, MEANINGS[reason].sentence)
                gang.delivery.settled()

    def close(self, timeout_s: float) -> bool:
        """Wait until everything is delivered; return whether it is, by then."""
        for gang in self._gangs.values():
            if gang.thread is not None:
                gang.thread.join(timeout_s)
        late = [gang for gang in self._gangs.values() if gang.thread is not None and gang.thread.is_alive()]
        for gang in late:
            if gang.delivery is not None:
                gang.delivery.stop()
        return not late


class _Gang(msgspec.Struct):
    recording: Recording
    next_ns: int
    delivery: MlflowDelivery | None = None
    thread: threading.Thread | None = None


class _Listener:
    def __init__(self, telemetry: Telemetry, run_id: str) -> None:
        self._telemetry, self._run_id = telemetry, run_id

    def tracked(self, tracked: TrackerRun) -> None:
        self._telemetry.tracked[self._run_id] = tracked

    def untracked(self, sentence: str, *, final: bool) -> None:
        """Do nothing: simulated gangs are not watched."""

    def said(self, sentence: str, *, note: bool) -> None:
        """Do nothing: simulated gangs are not watched."""


def _sample(at_ns: int, header: Header, node_rank: int) -> Sample:
    """Return made-up figures: waves, another one for each device and node."""
    seconds = (at_ns - header.origin_ns) / SECOND_NS
    waves = [
        0.5 + 0.5 * math.sin(2 * math.pi * (seconds / _TURN_S + 0.11 * (place + 3 * node_rank)))
        for place in range(len(header.devices))
    ]
    gpus = tuple(
        GpuSample(
            busy_percent=round(70 + 28 * wave, 1),
            memory_bytes=round(_MEMORY_BYTES * (0.6 + 0.3 * wave)),
            memory_total_bytes=2 * _MEMORY_BYTES,
            power_watts=round(420 + 240 * wave, 1),
            power_limit_watts=700.0,
            temperature_celsius=round(52 + 14 * wave, 1),
        )
        for wave in waves
    )
    share = sum(waves) / max(1, len(waves))
    host = HostSample(
        cpu_percent=round(20 + 40 * share, 1),
        memory_bytes=round(_HOST_BYTES * (0.3 + 0.1 * share)),
        memory_total_bytes=_HOST_BYTES,
    )
    return Sample(at_ns, host, gpus)
