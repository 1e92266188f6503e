"""Reads the telemetry of a run as series with the names that MLflow shows.

logs/<node rank>.telemetry of every node and attempt ─▶ read_metrics() ─▶ {"system/node_0/gpu_0_…": Series}

Pickle files of users contain the name of `Series` in this module, so nothing may move the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from serverless_gpu.model.telemetry import Header, decode, series


class Series(NamedTuple):
    """A named series: values and their timestamps in seconds since 1970, oldest first."""

    times: list[float]
    values: list[float]


def read_metrics(files: Iterable[bytes]) -> dict[str, Series]:
    """Return all series of a run by name. The order of the sample files does not matter."""
    found: dict[str, Series] = {}
    for data in files:
        header: Header | None = None
        for line in decode(data)[0]:
            if isinstance(line, Header):
                header = line
            elif header is not None:
                for name, value in series(header, line).items():
                    one = found.get(name)
                    if one is None:
                        one = found[name] = Series([], [])
                    one.times.append(line.at_ns / 1e9)
                    one.values.append(value)
    for name, one in found.items():
        # The order of the files is arbitrary, and an administrator may have set a node's clock back.
        if any(before > after for before, after in pairwise(one.times)):
            points = sorted(zip(one.times, one.values, strict=True))
            found[name] = Series([at for at, _ in points], [value for _, value in points])
    return dict(sorted(found.items()))
