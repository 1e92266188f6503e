"""Keeps two hours of a GPU's measured values in a fixed amount of memory.

    sample ─▶ bucket of 30 s: the highest value of each series ─▶ ring of 240 buckets ─▶ points

A bucket keeps the maximum, so that short peaks of use, memory, temperature and power stay visible.
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

from serverless_gpu.model.telemetry import GpuSample

BUCKET_S = 30
BUCKETS = 240
SERIES = ("busy_percent", "memory_bytes", "temperature_celsius", "power_watts")
_UNKNOWN = math.nan


class HistoryPoint(NamedTuple):
    """The highest values of one bucket. None stands for an unknown value."""

    at_s: int  # Start of the bucket, in seconds since 1970.
    values: tuple[float | None, ...]  # In the order of `SERIES`.


class DeviceHistory:
    """The last two hours of one device."""

    def __init__(self) -> None:
        self._newest = 0  # Number of the newest bucket since 1970; 0 before the first sample.
        self._rings = tuple(array("d", [_UNKNOWN]) * BUCKETS for _ in SERIES)

    def add(self, sample: GpuSample, *, wall_ns: int) -> None:
        """Add a sample. A sample older than the history is ignored."""
        bucket = wall_ns // 1_000_000_000 // BUCKET_S
        if bucket <= self._newest - BUCKETS:
            return
        for missing in range(max(self._newest + 1, bucket - BUCKETS + 1), bucket + 1):
            for ring in self._rings:
                ring[missing % BUCKETS] = _UNKNOWN
        self._newest = max(self._newest, bucket)
        for ring, name in zip(self._rings, SERIES, strict=True):
            value = getattr(sample, name)
            if value is not None and math.isfinite(value):
                before = ring[bucket % BUCKETS]
                ring[bucket % BUCKETS] = value if math.isnan(before) else max(before, value)

    def points(self, *, wall_ns: int) -> list[HistoryPoint]:
        """Return the buckets of the last two hours in order, without empty buckets at the beginning."""
        now = wall_ns // 1_000_000_000 // BUCKET_S
        found: list[HistoryPoint] = []
        for bucket in range(now - BUCKETS + 1, now + 1):
            is_kept = self._newest - BUCKETS < bucket <= self._newest
            values = tuple(_known(ring[bucket % BUCKETS]) if is_kept else None for ring in self._rings)
            if found or any(value is not None for value in values):
                found.append(HistoryPoint(bucket * BUCKET_S, values))
        return found


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
