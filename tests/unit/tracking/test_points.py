"""From a file of samples to points: windows, a cursor that outlives its process, what is dropped of too long a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from serverless_gpu.model.telemetry import HostSample, RankSample, Sample, encode
from serverless_gpu.tracking.base import Metric
from serverless_gpu.tracking.metric_points import MetricPoints, SampleCursor
from tests.support.tracking.deliveries import CALLED_NS, CPU, header, sample


def rows(path: Path, seconds: Sequence[int]) -> None:
    with path.open("ab") as file:
        for second in seconds:
            file.write(encode(sample(second)))


def written(path: Path, seconds: Sequence[int]) -> Path:
    path.write_bytes(encode(header()))
    rows(path, seconds)
    return path


def taken(points: MetricPoints, *, ended: bool = False) -> list[tuple[int, float]]:
    """Return step and value of one series, and note that they were sent."""
    found: list[tuple[int, float]] = []
    while batch := points.next(ended=ended):
        found += [(metric.step, metric.value) for metric in batch if metric.key == CPU]
        points.sent()
    return found


def test_no_file_has_no_points(tmp_path: Path) -> None:
    points = MetricPoints(tmp_path / "0.telemetry", 1, SampleCursor())
    assert taken(points, ended=True) == []
    assert points.cursor == SampleCursor()


def test_a_file_that_grows_becomes_points_of_ten_seconds(tmp_path: Path) -> None:
    path = written(tmp_path / "0.telemetry", [])
    points = MetricPoints(path, 1, SampleCursor())
    found: list[tuple[int, float]] = []
    for second in range(1, 25):
        rows(path, [second])
        found += taken(points)
    assert found == [(1, 1.0), (11, 6.5), (21, 16.5)]
    assert taken(points, ended=True) == [(24, 23.0)]


def test_moments_are_those_of_the_last_sample_of_a_window(tmp_path: Path) -> None:
    points = MetricPoints(written(tmp_path / "0.telemetry", [3]), 1, SampleCursor())
    assert Metric(CPU, 3.0, CALLED_NS // 1_000_000 + 3000, 3) in points.next(ended=False)


def test_what_is_next_stays_the_same_until_it_was_sent(tmp_path: Path) -> None:
    path = written(tmp_path / "0.telemetry", range(1, 12))
    points = MetricPoints(path, 1, SampleCursor())
    batch = list(points.next(ended=False))
    rows(path, range(12, 50))
    assert list(points.next(ended=True)) == batch
    assert points.cursor == SampleCursor()


@pytest.mark.parametrize("killed_after", range(1, 60, 7))
def test_a_process_that_starts_anew_cuts_the_same_windows(tmp_path: Path, killed_after: int) -> None:
    path = written(tmp_path / "0.telemetry", range(1, killed_after + 1))
    first = MetricPoints(path, 1, SampleCursor())
    found = taken(first)
    rows(path, range(killed_after + 1, 61))
    path.open("ab").close()
    second = MetricPoints(path, 1, first.cursor)
    found += taken(second, ended=True)
    assert found == taken(MetricPoints(path, 1, SampleCursor()), ended=True)


def test_half_a_line_is_waited_for_and_a_broken_one_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "0.telemetry", [1])
    points = MetricPoints(path, 1, SampleCursor())
    assert taken(points) == [(1, 1.0)]
    line = encode(sample(11))
    with path.open("ab") as file:
        file.write(b'[1,"broken"\n' + line[:20])
    assert taken(points) == []
    with path.open("ab") as file:
        file.write(line[20:])
    assert taken(points) == [(11, 11.0)]


def test_a_clock_that_was_set_back_ends_a_window(tmp_path: Path) -> None:
    path = written(tmp_path / "0.telemetry", [5, 6, 7, 2, 3])
    assert taken(MetricPoints(path, 1, SampleCursor()), ended=True) == [(5, 5.0), (2, 5.0), (3, 3.0)]


def test_a_request_has_room_for_a_thousand_points(tmp_path: Path) -> None:
    path = written(tmp_path / "0.telemetry", range(1, 5000))
    points = MetricPoints(path, 1, SampleCursor())
    sizes = []
    while batch := points.next(ended=True):
        sizes.append(len(batch))
        points.sent()
    assert max(sizes) <= 1000
    assert min(sizes[:-1]) > 900


def test_a_node_with_more_series_than_that_still_gets_on(tmp_path: Path) -> None:
    path = tmp_path / "0.telemetry"
    ranks = tuple(RankSample(rank, 1.0, 1, 1) for rank in range(400))
    lines = [Sample(CALLED_NS + second * 10**9, HostSample(), (), ranks) for second in (1, 2000, 4000)]
    path.write_bytes(encode(header()) + b"".join(encode(line) for line in lines))
    points = MetricPoints(path, 1, SampleCursor())
    steps = []
    while batch := points.next(ended=True):
        assert len(batch) == 1200
        steps.append(batch[0].step)
        points.sent()
    assert steps == [1, 2000, 4000]


def test_of_too_long_a_backlog_the_oldest_points_are_given_up(tmp_path: Path) -> None:
    path = written(tmp_path / "0.telemetry", range(1, 2001))
    size = path.stat().st_size
    points = MetricPoints(path, 1, SampleCursor(), backlog_bytes_max=size // 2)
    whole = MetricPoints(path, 1, SampleCursor())
    dropped = points.shorten()
    assert size - points.cursor.offset <= size // 2
    rest = taken(points, ended=True)
    assert rest == taken(whole, ended=True)[-len(rest) :]
    assert points.shorten() == 0
    per_moment = len({metric.key for metric in MetricPoints(path, 1, SampleCursor()).next(ended=False)})
    assert dropped == (201 - len(rest)) * per_moment


def test_a_long_run_has_a_bounded_number_of_points(tmp_path: Path) -> None:
    # As a recording writes it: a row a second for an hour, then half as many.
    seconds = [*range(1, 3601), *range(3602, 10_801, 2)]
    alone = taken(MetricPoints(written(tmp_path / "a", seconds), 1, SampleCursor()), ended=True)
    of_many = taken(MetricPoints(written(tmp_path / "b", seconds), 1000, SampleCursor()), ended=True)
    assert 700 < len(alone) <= 1081
    assert 100 < len(of_many) < 250
    assert of_many[-1][0] == alone[-1][0] == 10_800
