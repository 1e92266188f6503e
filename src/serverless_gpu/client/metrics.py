"""Reads a run's telemetry as series with MLflow's metric names.

logs/<node rank>.telemetry of every node and attempt ─▶ read_metrics() ─▶ {"system/node_0/gpu_0_…": Series}

The class `Series` must stay in `serverless_gpu.client.metrics`, because users' pickle files refer to this path.
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
    """Return a run's series by name. The sample files may be in any order."""
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
        # Samples may be out of order, because the files are unsorted and a node's clock may have been set back.
        if any(before > after for before, after in pairwise(one.times)):
            points = sorted(zip(one.times, one.values, strict=True))
            found[name] = Series([at for at, _ in points], [value for _, value in points])
    return dict(sorted(found.items()))
