"""Serves the telemetry of a run as charts with a bounded number of points.

    logs/<run>/<fence>/<node>.telemetry ─▶ lines from `from_ms` to `to_ms` ─▶ `TelemetryCharts` ─▶ TelemetryView

The samples of a file are in ascending order of time, apart from changes of a node's clock. The reader therefore finds
the start of a range by binary search, and reads only the requested part.

Failure cases:

* A node with a wrong clock: samples appear at the node's times. The reader never fails on the order of samples.

* A file with more than `READ_BYTES_MAX` bytes in the requested range: the charts contain the newest part. Zooming in
  shows earlier parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.model.spec import RANKS_MAX
from serverless_gpu.model.telemetry import Header, Sample, decode
from serverless_gpu.model.telemetry_charts import TelemetryCharts
from serverless_gpu.model.time_buckets import BUCKETS_MAX, Band, step_ms
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.runs.run_service import Fence
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.wire.runs import TelemetryChart, TelemetryLine, TelemetryView

READ_BYTES_MAX = 64 << 20
"""Maximum bytes of telemetry that one request reads. Eight devices write about 30 MB in ten days."""
_CHUNK_BYTES = 1 << 20
_LINE_BYTES = 64 << 10
"""Distance of the probes of the binary search. A longer line only makes the search less exact."""
_HEADER_BYTES = 256 << 10
_TELEMETRY = "telemetry"
Read = Callable[[int, int], bytes]
"""Returns up to a number of bytes from an offset of a telemetry file."""


class TelemetryQuery(Query, frozen=True, kw_only=True):
    """The requested range and resolution of telemetry charts.

    `node` is the number of a node in the attempt. The range defaults to the whole attempt. `last_ms` selects the time
    before the last sample. `step_ms` continues a chart with an earlier answer's step, unless the range then has too
    many buckets.
    """

    fence: Fence = 0
    node: Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)] = 0
    from_ms: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    to_ms: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = (1 << 53) - 1
    last_ms: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    buckets: Annotated[int, msgspec.Meta(ge=1, le=BUCKETS_MAX)] = 250
    step_ms: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0


routes = Routes("runs")


@routes.get("/runs/{run}/telemetry", needs=reading("runs"))
def read_telemetry(call: Call, logs: Logs, database: Transactions, run: str, query: TelemetryQuery) -> TelemetryView:
    """Return charts of one node's devices, ranks and machine."""

    if query.from_ms > query.to_ms:
        raise InvalidValue("the range of the telemetry ends before it begins", hint="from_ms must not exceed to_ms")
    stored = database.read(lambda db: run_views.visible(db, run, who=call.who, reach=call.reach))
    fence = query.fence or stored.fence
    complete = stored.state in TERMINAL or fence < stored.fence
    if not fence:
        return TelemetryView(fence=0, node=query.node, complete=complete)
    sizes = logs.sizes(run, fence)
    nodes = tuple(sorted(rank for rank, stream in sizes if stream == _TELEMETRY))
    size = sizes.get((query.node, _TELEMETRY), 0)

    def read(offset: int, limit: int) -> bytes:
        return logs.read(run, fence, rank=query.node, stream=_TELEMETRY, offset=offset, limit=limit)

    view = charts_of(read, size, query)
    return msgspec.structs.replace(view, fence=fence, nodes=nodes, complete=complete)


def charts_of(read: Read, size: int, query: TelemetryQuery) -> TelemetryView:
    """Return the charts of a telemetry file."""
    first, last = _first_sample(read, size), _last_sample(read, size)
    empty = TelemetryView(fence=0, node=query.node)
    if first is None or last is None:
        return empty
    start_ms, end_ms = first.at_ns // 1_000_000, max(first.at_ns, last.at_ns) // 1_000_000
    from_ms, to_ms = max(start_ms, query.from_ms), min(end_ms, query.to_ms)
    if query.last_ms:
        from_ms = max(from_ms, end_ms - query.last_ms)
    if from_ms > to_ms:
        return msgspec.structs.replace(empty, start_ms=start_ms, end_ms=end_ms)
    step = step_ms(from_ms, to_ms, query.buckets)
    if query.step_ms and to_ms // query.step_ms - from_ms // query.step_ms < BUCKETS_MAX:
        step = query.step_ms
    charts = TelemetryCharts(step)
    for line in _lines(read, size, from_ms, to_ms):
        charts.add(line)
    table, found = charts.charts()
    return TelemetryView(
        fence=0,
        node=query.node,
        start_ms=start_ms,
        end_ms=end_ms,
        step_ms=step,
        samples=charts.samples,
        times_ms=table.times_ms,
        charts=tuple(
            TelemetryChart(
                name=chart.kind.name,
                title=chart.kind.title,
                unit=chart.kind.unit,
                limit=chart.limit,
                omitted=chart.omitted,
                lines=tuple(_line(line.label, line.band) for line in chart.lines),
            )
            for chart in found
        ),
    )


def _line(label: str, band: Band) -> TelemetryLine:
    mean = _rounded(band.mean)
    low, high = _rounded(band.minimum), _rounded(band.maximum)
    if low == mean == high:
        return TelemetryLine(label=label, mean=mean)
    return TelemetryLine(label=label, minimum=low, mean=mean, maximum=high)


def _rounded(values: tuple[float | None, ...]) -> tuple[float | None, ...]:
    # Bytes need no fraction, and percentages, watts and degrees one digit.
    return tuple(
        None if value is None else int(value) if value > 100_000 or value == int(value) else round(value, 1)
        for value in values
    )


# --- parts of a file --------------------------------------------------------------------------------------------------


def _lines(read: Read, size: int, from_ms: int, to_ms: int) -> Iterator[Header | Sample]:
    """Yield the samples of a time range, after the header that describes their devices."""
    # The binary search is exact only up to the distance of its probes.
    end = min(size, _offset_of(read, size, to_ms + 1) + 2 * _LINE_BYTES)
    at = max(_offset_of(read, size, from_ms), end - READ_BYTES_MAX)
    if at:
        header = _header_before(read, at)
        if header is not None:
            yield header
        at += read(at, 2 * _LINE_BYTES).find(b"\n") + 1
    while at < end:
        data = read(at, min(_CHUNK_BYTES, end - at))
        lines, used = decode(data)
        for line in lines:
            if isinstance(line, Header) or from_ms <= line.at_ns // 1_000_000 <= to_ms:
                yield line
        if not used and len(data) < _CHUNK_BYTES:
            return  # The rest is an incomplete line.
        at += used or len(data)


def _offset_of(read: Read, size: int, at_ms: int) -> int:
    """Return an offset before the first sample at or after a time, and after most earlier samples."""
    low, high = 0, size
    while high - low > _LINE_BYTES:
        middle = (low + high) // 2
        sample = _sample_in(read(middle, _LINE_BYTES))
        if sample is not None and sample.at_ns // 1_000_000 < at_ms:
            low = middle
        else:
            high = middle
    return low


def _sample_in(data: bytes) -> Sample | None:
    """Return the first whole sample after a line feed."""
    for line in data.split(b"\n")[1:-1]:
        for found in decode(line + b"\n")[0]:
            if isinstance(found, Sample):
                return found
    return None


def _first_sample(read: Read, size: int) -> Sample | None:
    return _sample_in(b"\n" + read(0, min(size, _HEADER_BYTES)))


def _last_sample(read: Read, size: int) -> Sample | None:
    start = max(0, size - _HEADER_BYTES)
    lines = read(start, size - start).split(b"\n")[:-1]
    for line in reversed(lines):
        for found in decode(line + b"\n")[0]:
            if isinstance(found, Sample):
                return found
    return None


def _header_before(read: Read, offset: int) -> Header | None:
    """Return the last header before an offset."""
    end = offset
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        data = b"\n" * (start == 0) + read(start, end - start + 1)
        place = data.rfind(b"\n{", 0, len(data))
        if place >= 0:
            line = data[place + 1 :] + read(end + 1, _HEADER_BYTES)
            for found in decode(line.partition(b"\n")[0] + b"\n")[0]:
                if isinstance(found, Header):
                    return found
        end = start
    return None
