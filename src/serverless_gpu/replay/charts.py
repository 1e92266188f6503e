"""Draws charts of replays, with one line per scheduler, and charts of advice on reserved GPUs.

    replays  GPUs in use over time · waiting jobs over time · share of the jobs that waited less than …
    advice   share of the time with a demand of k GPUs or more, break-even duty · cost of k reserved GPUs, the minimum

The commands import `charts.py` on demand, because `charts.py` imports Matplotlib. The charts use Matplotlib's object
interface instead of `pyplot`, whose state belongs to the caller. The charts set all colours explicitly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from serverless_gpu.model.billing.advice import Advice, mix
from serverless_gpu.replay.figures import ReplayState, moments
from serverless_gpu.replay.simulation import Outcome
from serverless_gpu.units import MICROS_PER_UNIT

_COLUMNS = 400
_PAPER, _INK, _FAINT, _GRID = "#ffffff", "#1f2328", "#6a737d", "#e4e7eb"
_COLOURS = {"fifo": "#8b949e", "first-fit": "#b26a00", "srtf": "#7d4cc2", "srsf": "#0f7d6c", "ours": "#2166b0"}
_TICKS = ((1, "1 s"), (60, "1 min"), (3600, "1 h"), (86_400, "1 day"), (604_800, "1 week"), (2_592_000, "30 days"))
_UNITS = ((2 * 86_400.0, 86_400.0, "days"), (7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


class _Line(NamedTuple):
    """Means of a quantity over equal time intervals."""

    times: list[float]
    values: list[float]


def draw_replays(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Write the chart of several replays of one trace.

    Raises OSError when the file cannot be written. Raises ValueError when Matplotlib does not support the file type.
    """
    figure = Figure(figsize=(9.0, 9.0), facecolor=_PAPER, layout="constrained")
    used, queue, waits = figure.subplots(3, 1)
    figure.suptitle(title, color=_INK, fontsize=11, x=0.012, ha="left", parse_math=False)
    begin = min(outcome.jobs[0].submit_s for outcome in outcomes)
    end = max(begin + outcome.figures.span_s for outcome in outcomes)
    unit_s, unit = next((each, name) for least, each, name in _UNITS if end - begin >= least)
    for outcome in outcomes:
        shown = list(moments(outcome.jobs, outcome.spans))
        _draw_line(used, _means(shown, lambda moment: moment.used, (begin, end)), outcome, unit_s)
        _draw_line(queue, _means(shown, lambda moment: moment.waiting, (begin, end)), outcome, unit_s)
        _draw_waits(waits, outcome)
    used.axhline(outcomes[0].cluster.gpus, color=_FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
    _style(used, f"GPUs in use, of {outcomes[0].cluster.gpus}", grid=True)
    _style(queue, "waiting jobs", grid=True)
    for panel in (used, queue):
        panel.set_xlim(0, (end - begin) / unit_s)
        panel.set_ylim(bottom=0)
        panel.set_xlabel(f"{unit} since the first job arrived", color=_FAINT, fontsize=9)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 3, 5, 6, 10]))
    _style(waits, "jobs that waited at most this long, %", grid=True)
    waits.set_xscale("log")
    most = max(60.0, *(outcome.figures.wait.most for outcome in outcomes))
    waits.set_xlim(1, most)
    waits.set_xticks([at_s for at_s, _ in _TICKS if at_s <= most], [name for at_s, name in _TICKS if at_s <= most])
    waits.minorticks_off()
    waits.set_ylim(0, 101)
    used.legend(frameon=False, fontsize=9, labelcolor=_INK, ncols=5, loc="lower right", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130, facecolor=_PAPER)


def _draw_line(panel: Axes, line: _Line, outcome: Outcome, unit_s: float) -> None:
    times = [(at_s - line.times[0]) / unit_s for at_s in line.times]
    panel.plot(times, line.values, color=_colour(outcome), linewidth=1.1, label=outcome.policy)


def _draw_waits(panel: Axes, outcome: Outcome) -> None:
    held = (sum(ended - began for began, ended in had) for had in outcome.spans)
    waits = sorted(
        max(0.0, had[-1][1] - job.submit_s - taken)
        for job, had, taken in zip(outcome.jobs, outcome.spans, held, strict=True)
    )
    parts = [100 * (place + 1) / len(waits) for place in range(len(waits))]
    panel.step([max(1.0, wait) for wait in waits], parts, where="post", color=_colour(outcome), linewidth=1.3)


def _colour(outcome: Outcome) -> str:
    return _COLOURS.get(outcome.policy, _INK)


def _style(panel: Axes, text: str, *, grid: bool = False) -> None:
    panel.set_facecolor(_PAPER)
    panel.set_title(text, loc="left", color=_INK, fontsize=10)
    panel.tick_params(colors=_FAINT, labelsize=8, length=2, labelcolor=_FAINT)
    for name, spine in panel.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_GRID)
    if grid:
        panel.grid(axis="y", color=_GRID, linewidth=0.6)
    panel.set_axisbelow(True)


def _means(shown: Sequence[ReplayState], value: Callable[[ReplayState], float], span: tuple[float, float]) -> _Line:
    """Return the mean of a quantity for each column of the chart."""
    begin, end = span
    width = max((end - begin) / _COLUMNS, 1e-9)
    sums = [0.0] * _COLUMNS
    for moment, following in pairwise(shown):
        first = min(_COLUMNS - 1, int((moment.at_s - begin) / width))
        last = min(_COLUMNS - 1, int((following.at_s - begin) / width))
        for column in range(first, last + 1):
            low, high = begin + column * width, begin + (column + 1) * width
            sums[column] += value(moment) * max(0.0, min(high, following.at_s) - max(low, moment.at_s))
    return _Line([begin + (column + 0.5) * width for column in range(_COLUMNS)], [each / width for each in sums])


_POINTS = 400
_WORKED, _IDLE, _BEYOND, _LEAST = "#2166b0", "#c9d1d9", "#e0a45c", "#0f7d6c"


def draw_advice(advice: Advice, title: str, path: Path) -> None:
    """Write the chart of advice on reserved GPUs.

    Raises OSError when the file cannot be written. Raises ValueError when Matplotlib does not support the file type.
    """
    figure = Figure(figsize=(9.0, 7.2), facecolor=_PAPER, layout="constrained")
    wanted, costs = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, color=_INK, fontsize=11, x=0.012, ha="left", parse_math=False)
    most = max(1, advice.curve.peak, advice.now.slots)
    _draw_demand(wanted, advice, most)
    _draw_costs(costs, advice, most)
    for panel in (wanted, costs):
        panel.axvline(advice.best.slots, color=_LEAST, linewidth=1.2)
        panel.set_xlim(0, most)
        panel.set_ylim(bottom=0)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    costs.set_xlabel("reserved GPUs", color=_FAINT, fontsize=9)
    figure.savefig(path, dpi=130, facecolor=_PAPER)


def _draw_demand(panel: Axes, advice: Advice, most: int) -> None:
    """Draw the demand as a step curve, with slot k between k − 1 and k."""
    best = advice.best.slots
    edges, shares = [0], []
    for slot in advice.slots:
        edges.append(slot.last)
        shares.append(slot.share_percent)
    if edges[-1] < most:
        edges.append(most)
        shares.append(0.0)
    # Split the curve at the advised number of GPUs, so that used, idle and on-demand GPUs are separate areas.
    reserved = [(low, min(high, best), share) for low, high, share in zip(edges, edges[1:], shares, strict=False)]
    beyond = [(max(low, best), high, share) for low, high, share in zip(edges, edges[1:], shares, strict=False)]
    for label, colour, parts, bottom in (
        ("reserved, works", _WORKED, reserved, None),
        ("reserved, idle", _IDLE, reserved, 100.0),
        ("on demand", _BEYOND, beyond, None),
    ):
        kept = [(low, high, share) for low, high, share in parts if low < high]
        values = [share for _, _, share in kept]
        if kept:
            steps = [low for low, _, _ in kept] + [kept[-1][1]]
            panel.stairs(
                values if bottom is None else [bottom] * len(kept),
                steps,
                baseline=0 if bottom is None else values,
                fill=True,
                color=colour,
                label=label,
            )
    panel.axhline(advice.duty_percent, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
    panel.annotate(
        f"break-even duty {advice.duty_percent:.1f} %",
        (1.0, advice.duty_percent),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color=_INK,
        fontsize=8,
    )
    _style(panel, "share of the time with a demand of this many GPUs or more, %")
    panel.set_ylim(0, max(101.0, min(advice.duty_percent * 1.05, 200.0)))
    panel.legend(frameon=False, fontsize=9, labelcolor=_INK, loc="upper right", bbox_to_anchor=(1, 0.98))


def _draw_costs(panel: Axes, advice: Advice, most: int) -> None:
    step = max(1, most // _POINTS)
    sizes = sorted({*range(0, most + 1, step), advice.best.slots, advice.now.slots, most})
    mixes = [mix(advice.curve, advice.rates, size) for size in sizes]
    worked = [(each.reserved_micros - each.idle_micros) / MICROS_PER_UNIT for each in mixes]
    idle = [each.idle_micros / MICROS_PER_UNIT for each in mixes]
    beyond = [each.on_demand_micros / MICROS_PER_UNIT for each in mixes]
    panel.stackplot(sizes, worked, idle, beyond, colors=[_WORKED, _IDLE, _BEYOND])
    panel.plot(sizes, [each.micros / MICROS_PER_UNIT for each in mixes], color=_INK, linewidth=1.0)
    panel.plot([advice.best.slots], [advice.best.micros / MICROS_PER_UNIT], "o", color=_LEAST, markersize=6)
    panel.annotate(
        f"least: {advice.best.slots} GPUs",
        (advice.best.slots, advice.best.micros / MICROS_PER_UNIT),
        xytext=(6, 14),
        textcoords="offset points",
        color=_INK,
        fontsize=9,
    )
    if advice.now.slots:
        panel.axvline(advice.now.slots, color=_FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
        today = (advice.now.slots, 0.97)
        above = panel.get_xaxis_transform()
        panel.annotate(
            "today",
            today,
            xycoords=above,
            xytext=(4, 0),
            textcoords="offset points",
            color=_FAINT,
            fontsize=8,
            va="top",
        )
    _style(panel, f"total cost of the time range, {advice.rates.currency}")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 or not value else f"{value:.2f}")
