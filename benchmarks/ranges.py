"""What medians were in several runs, and whether they still are: `python -m benchmarks --record-ranges`, `--check`.

    five runs ─▶ per row: least and most of ours ÷ theirs ─▶ benchmarks/ranges.json, with the machine they are of
    one run   ─▶ a median that is over the most by a fifth is a regression; under the least by a fifth: record anew

A ratio carries over to another machine as far as two programs do on the same one, so the machine is told and not asked.
One run that is over the range is measured once more before it counts: a machine that was busy is no regression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import Row

FILE = Path(__file__).with_name("ranges.json")
RUNS = 5
TOLERANCE = 1.2
ROWS = (
    "import",
    "writes-sqlite",
    "submissions-sqlite",
    "remote-warm",
    "up",
    "load-ranks",
)
"""What is recorded and checked, in quick rounds: rows that take seconds, beside something that moves alike."""


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Ours ÷ theirs by medians, in every run that was recorded."""

    against: str
    ratios: tuple[float, ...]

    @property
    def limit(self) -> float:
        """Return what a median may not be over."""
        return max(self.ratios) * TOLERANCE


class Ranges(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded, and on what."""

    machine: dict[str, str]
    rows: dict[str, Range]


Measure = Callable[[str], Row]


def record(names: Sequence[str], measure: Measure, *, machine: dict[str, str], runs: int = RUNS) -> Ranges:
    """Measure rows several times, in turns.

    Args:
        names: the rows.
        measure: measures one.
        machine: what they are measured on.
        runs: how often.
    """
    found: dict[str, list[Row]] = {name: [] for name in names}
    for _ in range(runs):
        for name in names:
            found[name].append(measure(name))
    ranges = {
        name: Range(against=rows[0].against[0].label, ratios=tuple(round(row.ratio(row.against[0]), 4) for row in rows))
        for name, rows in found.items()
    }
    return Ranges(machine=machine, rows=ranges)


def check(names: Sequence[str], measure: Measure, known: Ranges) -> list[str]:
    """Measure rows, and return what is slower than it was, in sentences.

    Args:
        names: the rows.
        measure: measures one.
        known: what was recorded.
    """
    slower: list[str] = []
    for name in names:
        if name not in known.rows:
            slower.append(f"{name}: nothing is recorded; run `python -m benchmarks --record-ranges --only {name}`")
            continue
        limit = known.rows[name].limit
        ratios: list[float] = []
        while len(ratios) < 2 and (not ratios or ratios[-1] > limit):
            row = measure(name)
            ratios.append(row.ratio(row.against[0]))
        if min(ratios) > limit:
            told = " and ".join(f"{ratio:.3g}×" for ratio in ratios)
            kept = f"recorded were up to {max(known.rows[name].ratios):.3g}×, {limit:.3g}× may be"
            slower.append(f"{name}: {told} {known.rows[name].against}; {kept}")
    return slower


def read(path: Path = FILE) -> Ranges:
    """Return what was recorded."""
    return msgspec.json.decode(path.read_bytes(), type=Ranges)


def write(ranges: Ranges, path: Path = FILE) -> None:
    """Keep what was recorded; rows that were not measured now stay as they were."""
    rows = {**(read(path).rows if path.exists() else {}), **ranges.rows}
    kept = Ranges(machine=ranges.machine, rows=dict(sorted(rows.items())))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
