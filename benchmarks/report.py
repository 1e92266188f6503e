"""Numbers of a run: timings, rows, the machine; as a table and as JSON. Nothing is measured here.

A bar that was missed says so; a row that could not be measured says why.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

_PACKAGES = ("serverless-gpu", "torch", "numpy", "accelerate", "torchrunx")


@dataclass(frozen=True)
class Timing:
    """All rounds of one contestant, in milliseconds, or in another unit."""

    label: str
    values: tuple[float, ...]
    unit: str = "ms"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self) -> str:
        low, middle, high = (
            _ms(value) if self.unit == "ms" else _mb(value)
            for value in (min(self.values), self.median, max(self.values))
        )
        return f"{middle} ({low} – {high}, n={len(self.values)})" if low != high else middle

    def json(self) -> dict[str, object]:
        rounded = [round(value, 3) for value in self.values]
        return {
            "label": self.label,
            f"median_{self.unit}": round(self.median, 3),
            f"min_{self.unit}": min(rounded),
            f"max_{self.unit}": max(rounded),
            "rounds": rounded,
        }


@dataclass(frozen=True)
class Row:
    """One comparison: us against the first neighbour, the others beside it.

    Attributes:
        bar: what is to be reached, in words; "" for a row that only informs.
        met: whether it was; None without a bar.
        value: the number that the bar is about, in words, when it is not the ratio.
        also: timings worth knowing that no bar is about.
        problems: contestants that could not be measured, and why.
    """

    name: str
    ours: Timing
    against: tuple[Timing, ...]
    bar: str = ""
    met: bool | None = None
    value: str = ""
    also: tuple[Timing, ...] = ()
    problems: tuple[str, ...] = ()
    load: tuple[float, float] = (0.0, 0.0)

    def ratio(self, other: Timing) -> float:
        return self.ours.median / other.median

    def json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "ours": self.ours.json(),
            "against": [{**other.json(), "ratio": round(self.ratio(other), 4)} for other in self.against],
            "bar": self.bar,
            "met": self.met,
            "value": self.value,
            "also": [timing.json() for timing in self.also],
            "problems": list(self.problems),
            "load_average_before_after": list(self.load),
        }


@dataclass
class Report:
    """A whole run."""

    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)

    def json(self) -> dict[str, object]:
        return {"machine": self.machine, "rows": [row.json() for row in self.rows], "failures": self.failures}

    def missed(self) -> list[str]:
        return [row.name for row in self.rows if row.met is False]

    def table(self) -> str:
        """Return the run as Markdown."""
        lines = [
            "| what | ours: median (min – max) | against: median (min – max) | ours ÷ theirs | bar | |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            lines += _row_lines(row)
        lines += ["", *(f"- {key}: {value}" for key, value in self.machine.items())]
        notes = [f"- {row.name}: {problem}" for row in self.rows for problem in row.problems]
        notes += [f"- {row.name}: {timing.label}: {timing.text()}" for row in self.rows for timing in row.also]
        notes += [f"- not measured: {failure}" for failure in self.failures]
        return "\n".join([*lines, *notes])


def _row_lines(row: Row) -> list[str]:
    verdict = {True: "met", False: "**missed**", None: ""}[row.met]
    bar = " · ".join(text for text in (row.bar, row.value) if text)
    lines = []
    for number, other in enumerate(row.against):
        ratio = _ratio(row.ratio(other))
        first = (row.name, row.ours.text()) if number == 0 else ("", "")
        last = (bar, verdict) if number == 0 else ("", "")
        lines.append("| " + " | ".join((*first, f"{other.label}: {other.text()}", ratio, *last)) + " |")
    return lines


def describe_machine() -> dict[str, str]:
    """Return what a reader needs to judge the numbers."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {_processor()}, {memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(versions),
        "load average at the start": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    names = {key.strip(): value.strip() for key, value in facts.items()}
    virtual = " (virtual)" if " hypervisor" in names.get("flags", "") else ""
    return names.get("model name", platform.machine()) + virtual


def _ms(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms"


def _mb(value: float) -> str:
    return f"{value * 1000:.1f} kB" if value < 1 else f"{value:.1f} MB"


def _ratio(value: float) -> str:
    if value >= 0.1:
        return f"{value:.2f}×"
    return f"{value:.3f}×" if value >= 0.001 else "< 0.001×"
