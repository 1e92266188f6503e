"""Charts of a telemetry file: ranges, steps, broken lines, and how much of a long file is read."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serverless_gpu.model.telemetry import Sample, decode
from serverless_gpu.server.runs import run_telemetry
from serverless_gpu.server.runs.run_telemetry import TelemetryQuery, charts_of
from serverless_gpu.wire.runs import TelemetryView
from tests.support.web.output import samples

START_S = 1_800_000_000


class Disk:
    """A telemetry file, and how many bytes of it were read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.bytes_read = 0

    def read(self, offset: int, limit: int) -> bytes:
        found = self.data[offset : offset + limit]
        self.bytes_read += len(found)
        return found

    def view(self, **query: int) -> TelemetryView:
        return charts_of(self.read, len(self.data), TelemetryQuery(**query))


HOUR = samples(3_600, start_ns=START_S * 10**9)


def chart(view: TelemetryView, name: str = "gpu-use") -> tuple[float | None, ...]:
    return next(chart for chart in view.charts if chart.name == name).lines[0].mean


def test_the_whole_attempt_has_at_most_the_requested_buckets_and_its_peak() -> None:
    view = Disk(HOUR).view(buckets=250)
    assert (view.start_ms, view.end_ms) == (START_S * 1000, (START_S + 3_599) * 1000)
    assert (view.step_ms, view.samples) == (15_000, 3_600)
    assert 200 < len(view.times_ms) <= 250
    line = view.charts[0].lines[0]
    assert max(value for value in line.maximum if value is not None) == 99.0
    assert len(msgspec.json.encode(view)) < 150_000


@settings(max_examples=20)
@given(st.integers(min_value=0, max_value=3_700), st.integers(min_value=0, max_value=600))
def test_a_range_has_exactly_its_samples(start: int, length: int) -> None:
    view = Disk(HOUR).view(from_ms=(START_S + start) * 1000, to_ms=(START_S + start + length) * 1000, buckets=1000)
    expected = max(0, min(3_599, start + length) - start + 1)
    assert view.samples == len(view.times_ms) == expected
    if expected:
        assert view.times_ms[0] == (START_S + start) * 1000
        assert chart(view)[0] == samples_use(start)


def samples_use(second: int) -> float | None:
    sample = decode(HOUR)[0][second + 1]
    assert isinstance(sample, Sample)
    return sample.gpus[0].busy_percent


def test_the_end_of_a_long_file_costs_no_read_of_the_whole() -> None:
    disk = Disk(HOUR)
    view = disk.view(from_ms=(START_S + 3_595) * 1000, step_ms=1_000)
    assert (view.samples, view.step_ms) == (5, 1_000)
    assert chart(view)[-1] == samples_use(3_599)
    header_searches = len(HOUR)  # Backwards to the header, without decoding.
    assert disk.bytes_read < header_searches + 12 * (64 << 10) + (1 << 20)


def test_a_step_with_too_many_buckets_is_not_used() -> None:
    assert Disk(HOUR).view(step_ms=1_000).step_ms == 15_000
    assert Disk(HOUR).view(last_ms=60_000).samples == 61


def test_broken_lines_and_an_incomplete_end_do_not_count() -> None:
    lines = HOUR.split(b"\n")
    broken = b"\n".join([lines[0], lines[1], b'["x', b"\xff\x00", lines[2], lines[3][:20]])
    assert Disk(broken).view().samples == 2
    assert Disk(b"").view().times_ms == Disk(lines[0] + b"\n").view().times_ms == ()


def test_a_range_before_or_after_the_samples_is_empty() -> None:
    view = Disk(HOUR).view(from_ms=(START_S + 9_000) * 1000)
    assert (view.times_ms, view.end_ms) == ((), (START_S + 3_599) * 1000)
    assert Disk(HOUR).view(to_ms=5).charts == ()


def test_a_request_reads_a_bounded_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_telemetry, "READ_BYTES_MAX", 300_000)
    disk = Disk(HOUR)
    view = disk.view()
    assert 0 < view.samples < 2_000
    assert view.times_ms[-1] > (START_S + 3_500) * 1000  # The newest part.
