"""Keeps the latest measured values of GPUs and two hours of history, from heartbeats, in memory.

A history takes 8 KB, so that the histories of 1,000 GPUs take 8 MB. The values are lost at a restart of the server,
because they serve only the display. The receipts of runs contain the measured values that matter for accounts.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from serverless_gpu.model.device_history import DeviceHistory, HistoryPoint
from serverless_gpu.wire.agents import DeviceSample

FRESH_S = 30.0
"""Age in seconds above which a value is no longer current."""
DEVICES_MAX = 20_000


class LatestSample:
    """The latest sample of a device with its time."""

    __slots__ = ("at_ns", "history", "sample")

    def __init__(self, sample: DeviceSample, at_ns: int) -> None:
        self.sample = sample
        self.at_ns = at_ns
        self.history = DeviceHistory()


class DeviceSamples:
    """Stores samples by node and device. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, dict[str, LatestSample]] = {}

    def add(self, node_id: str, samples: Collection[DeviceSample], *, wall_ns: int) -> None:
        """Store the samples of a node's heartbeat. Devices without a sample keep only their history."""
        with self._lock:
            if not samples and node_id not in self._nodes:
                return
            there = self._nodes.setdefault(node_id, {})
            for sample in samples:
                kept = there.get(sample.uuid)
                if kept is None:
                    if sum(map(len, self._nodes.values())) >= DEVICES_MAX:
                        continue
                    kept = there[sample.uuid] = LatestSample(sample, wall_ns)
                kept.sample, kept.at_ns = sample, wall_ns
                kept.history.add(sample.sample, wall_ns=wall_ns)

    def latest(self, *, wall_ns: int) -> Mapping[str, Mapping[str, DeviceSample]]:
        """Return the current samples by node and device. Old samples are missing."""
        oldest_ns = wall_ns - round(FRESH_S * 1e9)
        with self._lock:
            return {
                node: {uuid: kept.sample for uuid, kept in there.items() if kept.at_ns >= oldest_ns}
                for node, there in self._nodes.items()
            }

    def history(self, node_id: str, *, wall_ns: int) -> Mapping[str, list[HistoryPoint]]:
        """Return the history of each device of a node."""
        with self._lock:
            return {uuid: kept.history.points(wall_ns=wall_ns) for uuid, kept in self._nodes.get(node_id, {}).items()}

    def forget(self, node_id: str) -> None:
        """Delete the samples of a forgotten node."""
        with self._lock:
            self._nodes.pop(node_id, None)
