"""A row that became slower than a fifth over what was recorded is told; one that was slow once is not."""

from __future__ import annotations

from pathlib import Path

from benchmarks import ranges
from benchmarks.ranges import Range, Ranges
from benchmarks.report import Row, Timing
from benchmarks.rows import ROWS
from tests.support.golden import golden


def row(ratio: float) -> Row:
    return Row(name="warm", ours=Timing("ours", (ratio * 10,)), against=(Timing("a fork", (10.0,)),))


KNOWN = Ranges(machine={}, rows={"warm": Range(against="a fork", ratios=(1.0, 1.2, 1.5, 1.1, 1.3))})


def checked(*ratios: float) -> list[str]:
    left = list(ratios)
    return ranges.check(["warm"], lambda _name: row(left.pop(0)), KNOWN)


def test_a_median_within_the_range_and_a_fifth_is_fine() -> None:
    assert checked(1.79) == checked(0.1) == []


def test_a_median_beyond_is_measured_again_and_told_when_it_stays() -> None:
    assert checked(1.9, 1.6) == []
    assert checked(1.9, 2.0) == [golden("benchmarks.bench_ranges.warm-fork-recorded")]


def test_a_row_that_was_never_recorded_is_no_silent_success() -> None:
    (told,) = ranges.check(["cold"], lambda _name: row(1.0), KNOWN)
    assert "nothing is recorded" in told and "--record-ranges --only cold" in told


def test_what_was_recorded_is_kept_and_rows_not_measured_now_stay(tmp_path: Path) -> None:
    path, left = tmp_path / "ranges.json", [1.0, 3.0, 2.0]
    recorded = ranges.record(["warm"], lambda _name: row(left.pop(0)), machine={"machine": "2 cores"}, runs=3)
    ranges.write(recorded, path)
    ranges.write(Ranges(machine={"machine": "4 cores"}, rows={"cold": Range(against="b", ratios=(5.0,))}), path)
    kept = ranges.read(path)
    assert kept.machine == {"machine": "4 cores"}
    assert kept.rows["warm"] == Range(against="a fork", ratios=(1.0, 3.0, 2.0))
    assert kept.rows["warm"].limit == 3.0 * ranges.TOLERANCE


def test_the_file_has_every_row_that_is_checked_five_times() -> None:
    known = ranges.read()
    assert set(ranges.ROWS) <= set(known.rows) <= set(ROWS)
    assert {len(known.rows[name].ratios) for name in ranges.ROWS} == {ranges.RUNS}
