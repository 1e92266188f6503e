"""What telemetry wrote of a run, as series by name: the same names as in MLflow.

logs/<node rank>.telemetry of every node and attempt ─▶ read_metrics() ─▶ {"system/node_0/gpu_0_…": Series}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from serverless_gpu.model.telemetry import Header, decode, series


class Series(NamedTuple):
    """One series: values and their moments, in seconds since 1970, oldest first."""

    times: list[float]
    values: list[float]


def read_metrics(files: Iterable[bytes]) -> dict[str, Series]:
    """Return all series of a run by name, those of several attempts one after the other.

    Args:
        files: contents of the files of samples, in any order.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for data in files:
        header: Header | None = None
        for line in decode(data)[0]:
            if isinstance(line, Header):
                header = line
            elif header is not None:
                at = line.at_ns / 1e9
                for name, value in series(header, line).items():
                    points.setdefault(name, []).append((at, value))
    return {name: _series(found) for name, found in sorted(points.items())}


def _series(points: list[tuple[float, float]]) -> Series:
    points.sort()  # a clock that was set back, attempts in another order
    return Series([at for at, _ in points], [value for _, value in points])
