"""Samples the machine: CPU, memory, the disk of the home, network.

A figure that cannot be read is None. The disk is asked every ten seconds only: on a network file system every question
is a message to its server.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from serverless_gpu.model.telemetry.samples import SECOND_NS, HostSample

_DISK_EVERY_NS = 10 * SECOND_NS
_NETWORKS = Path("/sys/class/net")


class Host:
    """Samples this machine; CPU counts between two samples, so the first one does not know it."""

    def __init__(self, home: Path, networks: Path = _NETWORKS) -> None:
        self._home = home
        self._networks = networks
        self._cpu: tuple[float, float] | None = None  # seconds: busy, all
        self._disk: tuple[int | None, int | None] = (None, None)
        self._disk_ns: int | None = None

    def sample(self, at_ns: int) -> HostSample:
        """Return a sample of the machine; `at_ns` is of any clock."""
        if self._disk_ns is None or not 0 <= at_ns - self._disk_ns < _DISK_EVERY_NS:
            self._disk, self._disk_ns = _disk(self._home), at_ns
        memory = psutil.virtual_memory()
        receive, transmit = self._network()
        return HostSample(
            cpu_percent=self._cpu_percent(),
            memory_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_bytes=self._disk[0],
            disk_total_bytes=self._disk[1],
            network_receive_bytes=receive,
            network_transmit_bytes=transmit,
        )

    def _cpu_percent(self) -> float | None:
        times = psutil.cpu_times()
        idle: float = times.idle + times.iowait
        # A guest's time is part of its host process's user time already.
        total: float = sum(times) - times.guest - times.guest_nice
        before, self._cpu = self._cpu, (total - idle, total)
        if before is None or total <= before[1]:
            return None
        share = (total - idle - before[0]) / (total - before[1])
        return round(min(100.0, max(0.0, share * 100)), 1)

    def _network(self) -> tuple[int | None, int | None]:
        """Return the bytes received and sent.

        Bridges, bonds and what containers have pass on what goes over a card, too: where there are cards, only they
        count. A container has none, and there everything counts but loopback.
        """
        try:
            counters = psutil.net_io_counters(pernic=True)
        except OSError:
            return None, None
        names = [name for name in counters if name != "lo"]
        cards = [name for name in names if (self._networks / name / "device").exists()]
        counted = [counters[name] for name in cards or names]
        return sum(card.bytes_recv for card in counted), sum(card.bytes_sent for card in counted)


def _disk(path: Path) -> tuple[int | None, int | None]:
    with contextlib.suppress(OSError):
        disk = os.statvfs(path)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        return used, used + disk.f_bavail * disk.f_frsize  # what root keeps for itself is not there
    return None, None
