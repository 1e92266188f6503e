"""Reads the metrics of a Ray cluster on this node, written by `inside/raycluster/monitor.py`.

Failure cases: no file; an old file, because Ray hangs or is gone; a file that is none of ours (a pipe, a directory, a
gigabyte): each counts as no metrics.
"""

from __future__ import annotations

import os
from pathlib import Path

from serverless_gpu.model.telemetry.samples import RAY_BYTES_MAX, RaySample, read_ray
from serverless_gpu.node.inside.raycluster.words import metrics_file


class RayFile:
    """The reader of one node's file: it is opened again only when it was written again."""

    def __init__(self, directory: Path, node_rank: int) -> None:
        self._path = Path(metrics_file(str(directory), node_rank))
        self._seen: tuple[int, int] | None = None
        self._data = b""

    def latest(self, now_ns: int) -> RaySample | None:
        """Return the latest metrics; None if they are missing or too old. `now_ns` is boottime."""
        try:
            found = os.stat(self._path)
            seen = (found.st_ino, found.st_mtime_ns)
            if seen != self._seen:
                # A pipe has nothing and does not block. A byte above the limit shows that the file is too large.
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
                try:
                    self._data = os.read(fd, RAY_BYTES_MAX + 1)
                finally:
                    os.close(fd)
                self._seen = seen
        except OSError:
            return None
        return read_ray(self._data, now_ns)
