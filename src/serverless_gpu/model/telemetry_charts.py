"""Sorts the telemetry samples of a node into charts, each with a line for every device or rank.

Header, Sample, Sample, … ─▶ TelemetryCharts.add ─▶ Downsampler ─▶ charts(): "gpu-use" with "GPU 0", "GPU 1", …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.telemetry import Header, Line, Sample
from serverless_gpu.model.time_buckets import Band, Downsampled, Downsampler, Value

Unit = Literal["percent", "bytes", "celsius", "watts"]
LINES_MAX = 32
"""Maximum number of lines in a chart. A chart counts the devices or ranks without a line."""


class ChartKind(NamedTuple):
    """Name, title and unit of a chart."""

    name: str
    title: str
    unit: Unit


GPU_CHARTS = (
    ChartKind("gpu-use", "GPU use", "percent"),
    ChartKind("gpu-memory", "GPU memory", "bytes"),
    ChartKind("gpu-temperature", "GPU temperature", "celsius"),
    ChartKind("gpu-power", "GPU power", "watts"),
)
RANK_CHARTS = (
    ChartKind("rank-cpu", "CPU use of the ranks (100 % = one core)", "percent"),
    ChartKind("rank-memory", "Memory of the ranks", "bytes"),
    ChartKind("rank-gpu-memory", "GPU memory of the ranks", "bytes"),
)
NODE_CHARTS = (
    ChartKind("node-cpu", "CPU use of the node", "percent"),
    ChartKind("node-memory", "Memory of the node", "bytes"),
)
KINDS = (*GPU_CHARTS, *RANK_CHARTS, *NODE_CHARTS)


class ChartLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a chart: a device, a rank or the node."""

    label: str
    band: Band


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart with its lines.

    Attributes:
        limit: capacity of one device, such as its memory in bytes, or None.
        omitted: number of devices or ranks without a line.
    """

    kind: ChartKind
    lines: tuple[ChartLine, ...]
    limit: float | None = None
    omitted: int = 0


class TelemetryCharts:
    """Collects the lines of a telemetry file, in the order of the file."""

    def __init__(self, step_ms: int) -> None:
        self._downsampler = Downsampler(step_ms)
        self._header: Header | None = None
        self._columns: dict[tuple[ChartKind, str], int] = {}
        self._omitted: dict[ChartKind, set[str]] = {}
        self._layouts: dict[tuple[int, tuple[int, ...]], _Layout] = {}
        self._limits: dict[str, float] = {}
        self.samples = 0

    def add(self, line: Line) -> None:
        """Add a header or a sample. Samples before the first header have no known devices, and do not count."""
        if isinstance(line, Header):
            if line != self._header:
                self._header, self._layouts = line, {}
            return
        if self._header is None:
            return
        ranks = tuple(rank.rank for rank in line.ranks)
        layout = self._layouts.get((len(line.gpus), ranks))
        if layout is None:
            layout = self._layouts[len(line.gpus), ranks] = self._layout(self._header, len(line.gpus), ranks)
        self.samples += 1
        self._downsampler.add(line.at_ns // 1_000_000, layout.columns, self._values(line, layout))

    def charts(self) -> tuple[Downsampled, tuple[Chart, ...]]:
        """Return the downsampled table, and the charts with at least one value."""
        table = self._downsampler.result()
        charts = []
        for kind in KINDS:
            lines = tuple(
                ChartLine(label=label, band=table.bands[column])
                for (of, label), column in self._columns.items()
                if of == kind and column in table.bands
            )
            if lines:
                omitted = len(self._omitted.get(kind, ()))
                charts.append(Chart(kind=kind, lines=lines, limit=self._limits.get(kind.name), omitted=omitted))
        return table, tuple(charts)

    def _layout(self, header: Header, gpus: int, ranks: tuple[int, ...]) -> _Layout:
        # The samples of CPU slots repeat the samples of their ranks.
        shown = [n for n, device in enumerate(header.devices[:gpus]) if device.kind is not DeviceKind.CPU]
        shown_gpus = [n for n in shown if self._admit(GPU_CHARTS, f"GPU {n}")]
        shown_ranks = [place for place, rank in enumerate(ranks) if self._admit(RANK_CHARTS, f"rank {rank}")]
        columns = [self._columns[kind, f"GPU {n}"] for n in shown_gpus for kind in GPU_CHARTS]
        columns += [self._columns[kind, f"rank {ranks[place]}"] for place in shown_ranks for kind in RANK_CHARTS]
        self._admit(NODE_CHARTS, "node")
        columns += [self._columns[kind, "node"] for kind in NODE_CHARTS]
        return _Layout(tuple(columns), shown_gpus, shown_ranks)

    def _admit(self, kinds: Sequence[ChartKind], label: str) -> bool:
        """Give a device or a rank a line in some charts. Return False if the charts are full."""
        if (kinds[0], label) in self._columns:
            return True
        if sum(kind == kinds[0] for kind, _ in self._columns) >= LINES_MAX:
            for kind in kinds:
                self._omitted.setdefault(kind, set()).add(label)
            return False
        for kind in kinds:
            self._columns[kind, label] = len(self._columns)
        return True

    def _values(self, sample: Sample, layout: _Layout) -> list[Value]:
        values: list[Value] = []
        for place in layout.gpus:
            gpu = sample.gpus[place]
            values += (gpu.busy_percent, gpu.memory_bytes, gpu.temperature_celsius, gpu.power_watts)
            if gpu.memory_total_bytes:
                self._limits["gpu-memory"] = self._limits["rank-gpu-memory"] = gpu.memory_total_bytes
            if gpu.power_limit_watts:
                self._limits["gpu-power"] = gpu.power_limit_watts
        for place in layout.ranks:
            rank = sample.ranks[place]
            values += (rank.cpu_percent, rank.memory_bytes, rank.gpu_memory_bytes)
        host = sample.host
        values += (host.cpu_percent, host.memory_bytes)
        if host.memory_total_bytes:
            self._limits["node-memory"] = host.memory_total_bytes
        if layout.gpus:
            self._limits["gpu-use"] = 100.0
        self._limits["node-cpu"] = 100.0
        return values


class _Layout(NamedTuple):
    columns: tuple[int, ...]
    gpus: list[int]  # Places in `Sample.gpus`.
    ranks: list[int]  # Places in `Sample.ranks`.
