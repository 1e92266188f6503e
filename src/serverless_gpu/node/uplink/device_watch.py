"""Keeps the latest measured values of the node's GPUs for heartbeats.

    monitor ─ NodeFrame, every 5 s ─▶ DeviceWatch ─ latest ─▶ Heartbeat.samples ─▶ server

The thread starts the monitor of the home if none runs, and connects again after the monitor has ended. A node without
GPUs starts no monitor. If the monitor sends nothing, heartbeats contain no values, and runs are not affected.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.monitor import start_stop
from serverless_gpu.node.monitor.frames import FrameReader
from serverless_gpu.node.monitor.messages import NodeFrame
from serverless_gpu.wire.agents import DeviceSample

INTERVAL_S = 5.0
_FRESH_NS = 30 * 10**9
_TURN_S = 2.0


class DeviceWatch:
    """Reads the monitor's frames in a thread."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home = home
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: tuple[DeviceSample, ...] = ()
        self._at_ns = 0
        self._wanted = threading.Event()

    def want(self) -> None:
        """Begin to watch, because the node has a GPU."""
        self._wanted.set()

    def latest(self) -> tuple[DeviceSample, ...]:
        """Return the latest values, or nothing without a recent frame."""
        with self._lock:
            is_fresh = self._clock.boottime_ns() - self._at_ns < _FRESH_NS
            return self._latest if is_fresh else ()

    def follow(self) -> None:
        """Read frames in an endless loop."""
        self._wanted.wait()
        fakes = os.environ.get("SERVERLESS_GPU_FAKE", "")
        reader = FrameReader(
            lambda: start_stop.ensure(self._home, os.environ), fakes, self._clock, interval_s=INTERVAL_S
        )
        with contextlib.suppress(ServerlessGpuError, OSError):  # `take` connects again.
            reader.open()
        while True:
            select.select(reader.fds(), [], [], _TURN_S)
            if reader.take() and reader.frame is not None:
                self._keep(reader.frame)

    def _keep(self, frame: NodeFrame) -> None:
        holders = {uuid: attempt.run_id for attempt in frame.attempts for uuid in attempt.devices}
        samples = tuple(
            DeviceSample(uuid=device.uuid, run=holders.get(device.uuid, ""), sample=sample)
            for device, sample in zip(frame.devices, frame.sample.gpus, strict=False)
            if device.kind is not DeviceKind.CPU
        )
        with self._lock:
            self._latest, self._at_ns = samples, self._clock.boottime_ns()
