"""Draws the figure of `Run.plot()`: utilization and memory of every device over time.

    1 device     two panels, one above the other        ┐
    2 to 8       a row for each: use | memory           ├─ marks as lines through all, explained below the panels
    more         two heat maps, a row for each device   ┘

Event markers show failures and stop requests. Only figure modules import Matplotlib. Callers import figure modules at
first use. Figure modules do not use `pyplot`, because `pyplot` would change the caller's global state. Figure modules
set all colours explicitly, so that the caller's Matplotlib style has no effect. If the run has no samples, the figure
contains a message. Names appear without control characters and without math mode for ``$``.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from serverless_gpu.client.runs import timeline
from serverless_gpu.client.runs.timeline import Curve, CurveMark, Lane
from serverless_gpu.units import format_duration_ms

ROWS_MAX = 8  # Maximum number of devices with curves. For more devices, the figure contains heat maps.
MARKS_MAX = 8
_LITTLE = 3  # Minimum number of samples for drawing a curve as a line instead of points.
_WIDTH_IN = 10.0
_ABOVE_IN = 1.0
_LETTERS = "ABCDEFGH"
_LETTER_POINTS = 8.0  # Width of an event marker's letter, including the space beside the letter.

_PAPER, _INK, _FAINT, _GRID, _NOTHING = "#ffffff", "#1f2328", "#6a737d", "#e4e7eb", "#e4e7eb"
_BUSY, _MEMORY = "#2166b0", "#0f7d6c"
_MARKS = {"failure": ("#c62828", "-"), "stop": ("#b26a00", "--"), "attempt": ("#57606a", ":")}
_MAPS = {
    _BUSY: LinearSegmentedColormap.from_list("busy", ["#f7fafd", "#8dbbe8", _BUSY, "#0d3565"]),
    _MEMORY: LinearSegmentedColormap.from_list("memory", ["#f6fbf9", "#86cabb", _MEMORY, "#08403a"]),
}


class Titles(NamedTuple):
    """A figure's titles: the run's name, and a line with facts about the run."""

    name: str
    about: str


class RunFigure(Figure):
    """A Matplotlib figure that a notebook can display as a cell's value with any backend."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


class _Stage(NamedTuple):
    """Event markers and time axis that all panels share. The time axis starts at `begin`."""

    begin: float
    end: float
    unit: float
    unit_name: str
    marks: Sequence[CurveMark]

    def at(self, moments: Sequence[float]) -> list[float]:
        """Convert times to positions on the time axis."""
        return [(moment - self.begin) / self.unit for moment in moments]


def draw(lanes: Sequence[Lane], marks: Sequence[CurveMark], titles: Titles, path: Path | None) -> RunFigure:
    """Return a run's figure and write it to `path` if given. Raise ValueError for an unknown file type."""
    marks = sorted(marks, key=lambda mark: mark.at)[:MARKS_MAX]
    height, n = 2.0, len(lanes)  # inches
    if n:
        rows = 3.6 if n == 1 else 0.72 * n + 0.4 if n <= ROWS_MAX else 2 * min(5.0, max(2.0, 0.085 * n))
        height = _ABOVE_IN + rows + 0.6 + 0.2 * len(marks)
    figure = RunFigure(figsize=(_WIDTH_IN, height), facecolor=_PAPER, layout=None)
    stage = _stage(lanes, marks)
    if stage is None:
        text = "this run has no samples: it ended within its first second or has not started"
        figure.text(
            0.5, 0.4, text, ha="center", va="center", color=_INK, fontsize=10,
            bbox={"facecolor": _PAPER, "edgecolor": _GRID, "boxstyle": "round,pad=0.5"},
        )  # fmt: skip
    elif len(lanes) > ROWS_MAX:
        _maps(figure, lanes, stage)
    else:
        _rows(figure, lanes, stage)
    few = stage is not None and timeline.samples(lanes) < _LITTLE
    _write_titles(figure, titles, "the run is too short for a curve with one sample per second" if few else "")
    if stage is not None:
        _write_marks(figure, stage)
    if path is not None:
        figure.savefig(path, dpi=130, facecolor=_PAPER)
    return figure


# --- the panels ---------------------------------------------------------------------------------------------------


def _rows(figure: Figure, lanes: Sequence[Lane], stage: _Stage) -> None:
    """Draw a utilization panel and a memory panel per device. Stack the panels of a single device."""
    alone = len(lanes) == 1
    shape = (2, 1) if alone else (len(lanes), 2)
    panels = figure.subplots(*shape, sharex=True, squeeze=False)
    left = 0.08 if alone else 0.16 if len({lane.node for lane in lanes}) > 1 else 0.11
    right, gap_in = (0.985, 0.6) if alone else (0.89, 0.16)
    _place(figure, stage, shape[0], left=left, right=right, gap_in=gap_in)
    top = max(
        (value for lane in lanes for value in (lane.memory_total or 0, timeline.peak(lane.memory) or 0)), default=0
    )
    for row, lane in enumerate(lanes):
        busy, memory = (panels[0][0], panels[1][0]) if alone else panels[row]
        _panel(busy, lane.busy, stage, _BUSY, max(100.0, timeline.peak(lane.busy) or 0))
        _panel(memory, lane.memory, stage, _MEMORY, 1.05 * (top or 1))
        if lane.memory_total:
            memory.axhline(lane.memory_total, color=_FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
        if alone:
            _head(busy, " · ".join(filter(None, (f"{_use_name(lane)}, %", _mean_text(lane)))))
            _head(memory, " · ".join(filter(None, (f"{_memory_name(lane)}", _peak_text(lane)))))
        else:
            _beside(busy, -0.085, "right", _label(lane, lanes), _mean_text(lane))
            _beside(memory, 1.015, "left", "", _peak_text(lane))
    if not alone:
        _head(panels[0][0], f"{_use_name(lanes[0])}, %")
        _head(panels[0][1], f"{_memory_name(lanes[0])}")
    for panel in panels[-1]:
        _time_axis(panel, stage)


def _panel(panel: Axes, curve: Curve, stage: _Stage, colour: str, top: float) -> None:
    _style(panel)
    moments, values = timeline.line(curve)
    points = len(curve[0]) < _LITTLE
    panel.fill_between(stage.at(moments), values, color=colour, alpha=0.18, linewidth=0)
    panel.plot(stage.at(moments), values, color=colour, linewidth=1.2, marker="o" if points else "", markersize=5)
    panel.set_ylim(0, top)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 2.5, 5, 10]))
    panel.grid(axis="y", color=_GRID, linewidth=0.6)
    _draw_marks(panel, stage)


def _maps(figure: Figure, lanes: Sequence[Lane], stage: _Stage) -> None:
    panels = figure.subplots(2, 1, sharex=True)
    _place(figure, stage, 2, left=0.13, right=0.955, gap_in=0.55)
    columns = max(1, min(timeline.COLUMNS_MAX, math.ceil(stage.end - stage.begin)))
    total = max(
        (value for lane in lanes for value in (lane.memory_total or 0, timeline.peak(lane.memory) or 0)), default=0
    )
    for panel, colour, head, top in (
        (panels[0], _BUSY, f"{_use_name(lanes[0])}, %", 100.0),
        (panels[1], _MEMORY, f"{_memory_name(lanes[0])}", total or 1.0),
    ):
        _style(panel)
        shown = [lane.busy if colour == _BUSY else lane.memory for lane in lanes]
        table = [timeline.cells(curve, stage.begin, stage.end, columns) for curve in shown]
        panel.set_facecolor(_NOTHING)
        extent = (0.0, (stage.end - stage.begin) / stage.unit, len(lanes) - 0.5, -0.5)
        image = panel.imshow(
            table, aspect="auto", interpolation="nearest", cmap=_MAPS[colour], vmin=0, vmax=top, extent=extent
        )
        bar = figure.colorbar(image, ax=panel, pad=0.015, fraction=0.03)
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=_FAINT, labelsize=8, length=2)
        _head(panel, head)
        _lane_axis(panel, lanes)
        _draw_marks(panel, stage)
    _time_axis(panels[1], stage)


def _lane_axis(panel: Axes, lanes: Sequence[Lane]) -> None:
    """Label a heat map's rows. Label only some rows if the space is insufficient."""
    starts = [place for place, lane in enumerate(lanes) if place == 0 or lane.node != lanes[place - 1].node]
    if len(lanes) <= 32 and len(starts) == 1:
        places = list(range(len(lanes)))
    else:
        step = max(1, math.ceil(len(starts) / 24))
        places = starts[::step] if len(starts) > 1 else list(range(0, len(lanes), math.ceil(len(lanes) / 16)))
    panel.set_yticks(places, [_label(lanes[place], lanes) for place in places])
    for place in starts[1:] if len(starts) <= 32 else ():
        panel.axhline(place - 0.5, color=_PAPER, linewidth=1.0)


def _time_axis(panel: Axes, stage: _Stage) -> None:
    panel.set_xlim(0, max(stage.at([stage.end])[0], 1e-3))
    panel.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 3, 5, 6, 10]))
    panel.tick_params(labelbottom=True)
    panel.set_xlabel(f"{stage.unit_name} since the run began", color=_FAINT, fontsize=9)


def _style(panel: Axes) -> None:
    panel.set_facecolor(_PAPER)
    panel.tick_params(colors=_FAINT, labelsize=8, length=2, labelcolor=_FAINT)
    for name, spine in panel.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_GRID)
    panel.set_axisbelow(True)


def _head(panel: Axes, text: str) -> None:
    panel.set_title(text, loc="left", color=_INK, fontsize=10, pad=14)


def _beside(panel: Axes, place: float, side: Literal["left", "right"], label: str, number: str) -> None:
    """Write a device's name beside its panel, and the device number below the name."""
    for text, y, colour in ((label, 0.62, _INK), (number, 0.3 if label else 0.5, _FAINT)):
        panel.text(place, y, text, transform=panel.transAxes, ha=side, va="center", color=colour, fontsize=8.5)


# --- text ---------------------------------------------------------------------------------------------------------


def _label(lane: Lane, lanes: Sequence[Lane]) -> str:
    return lane.label if len({other.node for other in lanes}) == 1 else f"node {lane.node} · {lane.label}"


def _use_name(lane: Lane) -> str:
    return "GPU utilisation" if lane.label.startswith("GPU") else "share of a core"


def _memory_name(lane: Lane) -> str:
    return "GPU memory, GiB" if lane.label.startswith("GPU") else "host memory, GB"


def _mean_text(lane: Lane) -> str:
    value = timeline.mean(lane.busy)
    return "" if value is None else f"mean {value:.0f} %"


def _peak_text(lane: Lane) -> str:
    value = timeline.peak(lane.memory)
    of_all = f" of {lane.memory_total:.0f}" if lane.memory_total else ""
    return "" if value is None else f"peak {value:.1f}{of_all}"


def _write_titles(figure: Figure, titles: Titles, remark: str) -> None:
    height = figure.get_figheight()
    about = " · ".join(filter(None, (titles.about, remark)))
    for text, inches, size, colour in ((titles.name, 0.22, 13, _INK), (about, 0.48, 9, _FAINT)):
        y = 1 - inches / height
        figure.text(
            0.012, y, _plain(text), ha="left", va="center", color=colour, fontsize=size, parse_math=False
        )  # fmt: skip


def _write_marks(figure: Figure, stage: _Stage) -> None:
    height = figure.get_figheight()
    for place, mark in enumerate(stage.marks):
        y = (0.16 + 0.2 * (len(stage.marks) - 1 - place)) / height
        colour = _MARKS[mark.kind][0]
        figure.text(0.012, y, _LETTERS[place], ha="left", va="center", color=colour, fontsize=9, fontweight="bold")
        text = _plain(f"{mark.sentence} · after {format_duration_ms(round(1000 * (mark.at - stage.begin)))}")
        figure.text(0.032, y, text, ha="left", va="center", color=_INK, fontsize=9, parse_math=False)


def _draw_marks(panel: Axes, stage: _Stage) -> None:
    first_row = panel.get_subplotspec()
    places = stage.at([mark.at for mark in stage.marks])
    width = panel.get_position().width * _WIDTH_IN * 72
    end = stage.at([stage.end])[0]
    gap = _LETTER_POINTS / width * end
    letters = timeline.spread(places, gap, end + gap / 2)
    for letter, mark, place, beside in zip(_LETTERS, stage.marks, places, letters, strict=False):
        colour, style = _MARKS[mark.kind]
        panel.axvline(place, color=colour, linestyle=style, linewidth=1.3)
        if first_row is not None and first_row.is_first_row():
            panel.annotate(
                letter, (beside, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 1), textcoords="offset points",
                ha="center", va="bottom", color=colour, fontsize=8, fontweight="bold", annotation_clip=False,
            )  # fmt: skip


def _plain(text: str) -> str:
    """Return text as a single line without control characters and with at most 150 characters."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return shown if len(shown) <= 150 else f"{shown[:149]}…"


# --- layout and time axis -----------------------------------------------------------------------------------------


def _place(figure: Figure, stage: _Stage, rows: int, *, left: float, right: float, gap_in: float) -> None:
    """Position the panels between the titles and the marker legend, with `gap_in` inches between rows."""
    height, below = figure.get_figheight(), 0.6 + 0.2 * len(stage.marks)
    panel_in = (height - _ABOVE_IN - below - gap_in * (rows - 1)) / rows
    figure.subplots_adjust(
        left=left, right=right, top=1 - _ABOVE_IN / height, bottom=below / height, hspace=gap_in / panel_in, wspace=0.1
    )


def _stage(lanes: Sequence[Lane], marks: Sequence[CurveMark]) -> _Stage | None:
    ends = timeline.span(lanes)
    if ends is None:
        return None
    moments = [*ends, *(mark.at for mark in marks)]
    begin, end = min(moments), max(moments)
    end = max(end, begin + 1.0)
    unit, name = timeline.unit_of(end - begin)
    return _Stage(begin, end, unit, name, marks)
