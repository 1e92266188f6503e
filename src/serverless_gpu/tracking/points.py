"""From a file of samples to points of MLflow's series: comes with the reader of such files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.tracking.base import Metric


class Cursor(NamedTuple):
    """Up to where a file was sent: samples from `offset` on that are later than `sent_ns` were not."""

    offset: int = 0
    sent_ns: int = 0


def telemetry_path(directory: Path, node_rank: int) -> Path:
    """Return where the samples of an attempt on a node are written."""
    return directory / "logs" / f"{node_rank}.telemetry"


class Points:
    """The points of one file; none yet."""

    def __init__(self, path: Path, num_nodes: int, cursor: Cursor) -> None:
        self._cursor = cursor

    @property
    def cursor(self) -> Cursor:
        """Return up to where the file was sent."""
        return self._cursor

    def next(self, *, ended: bool) -> Sequence[Metric]:
        """Return what one request has room for, the same again until `sent` is called; nothing when nothing is due."""
        return ()

    def sent(self) -> None:
        """Note that what `next` returned has arrived, or was given up."""

    def shorten(self) -> int:
        """Give up the oldest points as long as too much waits; return how many."""
        return 0
