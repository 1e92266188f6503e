"""Computes a run's timeline: device curves and event markers.

    metrics: "system/node_0/gpu_3_…" → times, values ─▶ Lane per device ─┬─ line: with breaks, at most 1,500 points
                                                                         └─ cells: at most 600 columns of a heat map
    runs/<run>/<fence>/  facts.jsonl (boottime ↔ wall) · stop_reason · stopped.json  ─┐
    a server's list of attempts ──────────────────────────────────────────────────────┴─▶ AttemptTimes ─▶ CurveMark

`run_figure.py` draws the timeline. For a run without GPUs, each lane shows a rank's CPU usage and host memory. A long
period without samples leaves a gap in the curve, for example between two attempts or while a node was unreachable. An
attempt whose supervisor was killed has no recorded end and therefore no event marker. The timeline ignores unreadable
files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from serverless_gpu.model.lifecycle.attempt import MEANINGS, FactKind, Reason, State
from serverless_gpu.node.attempt.history import first_facts, read_ending
from serverless_gpu.node.supervisor.attempt_files import STOP_FILE

Curve = tuple[Sequence[float], Sequence[float]]
"""Sample times in seconds since 1970, and the sample values."""
POINTS_MAX = 1_500
COLUMNS_MAX = 600
_GIB = 1 << 30
_FIRST_S = 1.0  # Assumed duration of the first sample in seconds, as in receipts.
# A step between two samples is a gap if the step exceeds this multiple of the previous step. The sample interval grows
# with the run's age, at most by a factor of two per step.
_HOLE = 4.0
_GPU = re.compile(r"system/node_(\d+)/gpu_(\d+)_(utilization_percentage|memory_usage_megabytes)")
_RANK = re.compile(r"system/node_(\d+)/rank_(\d+)_(cpu_utilization_percentage|memory_usage_megabytes)")
_EMPTY: Curve = ((), ())
_WORD_CHARACTERS = 32


class Lane(NamedTuple):
    """Utilization and memory curves of one device, or of one rank in a run without devices."""

    node: int  # Number of the node within the run.
    label: str  # Name of the device or rank.
    busy: Curve  # GPU utilization of the device or CPU usage of the rank in percent.
    memory: Curve  # GPU memory in GiB, as in nvidia-smi, or the host memory of a rank in GB.
    memory_total: float | None  # Total memory of the GPU in GiB, or None if unknown.


class CurveMark(NamedTuple):
    """An event to show in the figure, such as a failure. `at` is the event's time in seconds since 1970."""

    at: float
    kind: Literal["failure", "stop", "attempt"]
    sentence: str


def lanes(metrics: Mapping[str, Curve], totals: Mapping[tuple[int, int], int] | None = None) -> list[Lane]:
    """Return the curves of each GPU, or of each rank if the run has no GPUs.

    `totals` contains GPU memory in bytes.
    """
    found = []
    for place, series in sorted(_curves_by_device(metrics, _GPU).items()):
        memory = _scale(series.get("memory_usage_megabytes", _EMPTY), 1e6 / _GIB)
        total = (totals or {}).get(place)
        busy = series.get("utilization_percentage", _EMPTY)
        found.append(Lane(place[0], f"GPU {place[1]}", busy, memory, None if total is None else total / _GIB))
    if found:
        return found
    for (node, number), series in sorted(_curves_by_device(metrics, _RANK).items()):
        memory = _scale(series.get("memory_usage_megabytes", _EMPTY), 1e-3)
        found.append(Lane(node, f"rank {number}", series.get("cpu_utilization_percentage", _EMPTY), memory, None))
    return found


def span(lanes: Sequence[Lane]) -> tuple[float, float] | None:
    """Return the first and last sample times of all curves, or None if the curves have no samples."""
    ends = [
        moment for lane in lanes for times, _ in (lane.busy, lane.memory) if times for moment in (times[0], times[-1])
    ]
    return (min(ends), max(ends)) if ends else None


def samples(lanes: Sequence[Lane]) -> int:
    """Return the number of samples in the longest curve."""
    return max((len(times) for lane in lanes for times, _ in (lane.busy, lane.memory)), default=0)


def line(curve: Curve) -> tuple[list[float], list[float]]:
    """Return a curve as a line of at most POINTS_MAX points, with NaN in the gaps."""
    times, values = curve
    if len(times) > POINTS_MAX:
        times, values = _thin(times, values)
    drawn_times: list[float] = list(times[:1])
    drawn: list[float] = list(values[:1])
    for is_hole, moment, value in zip(_holes(times), times[1:], values[1:], strict=True):
        if is_hole:
            drawn_times.append(math.nan)
            drawn.append(math.nan)
        drawn_times.append(moment)
        drawn.append(value)
    return drawn_times, drawn


def cells(curve: Curve, begin: float, end: float, columns: int) -> list[float]:
    """Return a curve as a heat map row: the mean value per column, or NaN for a column without samples."""
    times, values = curve
    width = max(end - begin, 1e-9) / columns
    sums, counts = [0.0] * columns, [0] * columns
    for moment, value in zip(times, values, strict=True):
        column = min(columns - 1, max(0, int((moment - begin) / width)))
        sums[column] += value
        counts[column] += 1
    row = [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
    # Each value fills the heat map columns up to the next sample, because an old run's samples are far apart. A value
    # does not extend across a gap.
    for is_hole, (moment, following), value in zip(_holes(times), pairwise(times), values, strict=False):
        if not is_hole:
            first, last = (min(columns - 1, max(0, int((at - begin) / width))) for at in (moment, following))
            for column in range(first + 1, last):
                row[column] = value if math.isnan(row[column]) else row[column]
    return row


def mean(curve: Curve) -> float | None:
    """Return a curve's mean over time, weighted by duration. The first sample has a weight of one second."""
    times, values = curve
    if not values:
        return None
    spans = [_FIRST_S]
    spans += [
        0.0 if is_hole else after - before
        for is_hole, (before, after) in zip(_holes(times), pairwise(times), strict=True)
    ]
    return sum(width * value for width, value in zip(spans, values, strict=True)) / sum(spans)


def peak(curve: Curve) -> float | None:
    """Return a curve's largest value."""
    return max(curve[1], default=None)


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the time unit for an axis of the given length: the unit's length in seconds, and its name."""
    for limit, size, name in ((180, 1.0, "seconds"), (3 * 3600, 60.0, "minutes"), (72 * 3600, 3600.0, "hours")):
        if seconds < limit:
            return size, name
    return 86_400.0, "days"


def spread(places: Sequence[float], gap: float, end: float) -> list[float]:
    """Move ordered positions apart to a minimum distance.

    Keep each group of positions centred and inside the axis.
    """
    # Centre of each group of positions, and the group's number of positions.
    groups: list[tuple[float, int]] = []
    for place in places:
        middle, members = place, 1
        while groups and groups[-1][0] + gap * (groups[-1][1] + members) / 2 > middle:
            before, count = groups.pop()
            middle = (before * count + middle * members) / (count + members)
            members += count
        groups.append((middle, members))
    moved = [middle + gap * (at - (members - 1) / 2) for middle, members in groups for at in range(members)]
    for at in reversed(range(len(moved))):
        moved[at] = min(moved[at], end)
        end = moved[at] - gap
    return moved


def _curves_by_device(
    metrics: Mapping[str, Curve], pattern: re.Pattern[str]
) -> dict[tuple[int, int], dict[str, Curve]]:
    found: dict[tuple[int, int], dict[str, Curve]] = {}
    for name, curve in metrics.items():
        match = pattern.fullmatch(name)
        if match is not None and curve[0]:
            found.setdefault((int(match[1]), int(match[2])), {})[match[3]] = curve
    return found


def _scale(curve: Curve, factor: float) -> Curve:
    return curve[0], [value * factor for value in curve[1]]


def _holes(times: Sequence[float]) -> list[bool]:
    """Return, for each step between samples, True if the step is a gap."""
    steps = [after - before for before, after in pairwise(times)]
    if len(steps) < 2:
        return [False] * len(steps)
    before = [steps[1], steps[1], *steps]
    return [step > _HOLE * max(1.0, min(before[place : place + 2])) for place, step in enumerate(steps)]


def _thin(times: Sequence[float], values: Sequence[float]) -> Curve:
    """Reduce the number of points by averaging neighbouring samples, but never across a gap."""
    at_once = math.ceil(len(times) / POINTS_MAX)
    holes = _holes(times)
    thin_times: list[float] = []
    thin: list[float] = []
    start = 0
    for place in range(len(times)):
        if place + 1 == len(times) or holes[place] or place + 1 - start == at_once:
            count = place + 1 - start
            thin_times.append(times[start])
            thin.append(sum(values[start : place + 1]) / count)
            start = place + 1
    return thin_times, thin


class AttemptTimes(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt's event times in nanoseconds since 1970, with None for an unknown or future time."""

    fence: int
    state: State | None = None
    reason: Reason | None = None
    began_ns: int | None = None
    ended_ns: int | None = None
    asked_ns: int | None = None  # Time of the stop request.
    asked: str = ""  # Stop reason that the ranks received.
    failed_ns: int | None = None  # Time of the attempt's first failure.
    rank: int | None = None  # Rank that failed first.


def attempt_directories(run: Path) -> list[Path]:
    """Return a local run's attempt directories, in order."""
    try:
        children = list(run.iterdir())
    except OSError:
        return []
    return sorted((path for path in children if path.name.isascii() and path.name.isdigit()), key=lambda p: int(p.name))


def read_attempt_times(directory: Path) -> AttemptTimes:
    """Return an attempt's event times, read from the attempt directory."""
    facts = first_facts(directory)
    stopped = read_ending(directory)
    cause = stopped.cause if stopped is not None and stopped.state in (State.FAILED, State.LOST) else None
    failed_ns = None
    # Facts from the same boot contain both the wall clock time and the boot time.
    if cause is not None and facts and cause.at_ns > 0:
        failed_ns = facts[0].wall_ns + cause.at_ns - facts[0].boottime_ns
    return AttemptTimes(
        fence=int(directory.name),
        state=None if stopped is None else stopped.state,
        reason=None if stopped is None else stopped.reason,
        began_ns=next((fact.wall_ns for fact in facts if fact.kind is FactKind.EXEC), None),
        ended_ns=None if stopped is None else _written_ns(directory / "stopped.json"),
        asked_ns=_written_ns(directory / STOP_FILE),
        asked=_read_word(directory / STOP_FILE),
        failed_ns=failed_ns,
        rank=None if cause is None else cause.rank,
    )


def marks(attempts: Iterable[AttemptTimes]) -> list[CurveMark]:
    """Return a run's event markers: starts of later attempts, failures and stop requests."""
    found: list[CurveMark] = []
    for each in attempts:
        name = f"attempt {each.fence}" if each.fence > 1 else ""
        if each.fence > 1 and each.began_ns is not None:
            found.append(CurveMark(each.began_ns / 1e9, "attempt", f"{name} began"))
        if each.asked_ns is not None:
            found.append(
                CurveMark(each.asked_ns / 1e9, "stop", _label(name, f"stop requested: {each.asked or 'cancel'}"))
            )
        at_ns = each.failed_ns or each.ended_ns
        if each.state is None or each.reason is None or each.state is State.SUCCEEDED or at_ns is None:
            continue
        if each.state in (State.FAILED, State.LOST):
            rank = "" if each.rank is None else f", rank {each.rank}"
            text = f"{each.state.value} ({each.reason.value}{rank}): {MEANINGS[each.reason].sentence}"
            found.append(CurveMark(at_ns / 1e9, "failure", _label(name, text)))
        elif each.asked_ns is None:
            text = f"{each.state.value} ({each.reason.value}): {MEANINGS[each.reason].sentence}"
            found.append(CurveMark(at_ns / 1e9, "stop", _label(name, text)))
    return found


def _label(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text


def _written_ns(path: Path) -> int | None:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return None


def _read_word(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_WORD_CHARACTERS).strip()
    except OSError:
        return ""
