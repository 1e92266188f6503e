"""The picture of an advice: for how long each number of GPUs was wanted, and what each number of reserved ones costs.

    ┌ part of the time with a demand of k GPUs or more ──── break-even duty ┐
    └ cost of k reserved GPUs and the rest on demand ── the least ──────────┘

Matplotlib is imported here; callers load this module by name. `pyplot`, whose state is the caller's, is
not used, and all colours are set.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from serverless_gpu.model.billing.advice import Advice, mix
from serverless_gpu.units import MICROS_PER_UNIT

_POINTS = 400
_PAPER, _INK, _FAINT, _GRID = "#ffffff", "#1f2328", "#6a737d", "#e4e7eb"
_WORKED, _IDLE, _BEYOND, _LEAST = "#2166b0", "#c9d1d9", "#e0a45c", "#0f7d6c"


def draw(advice: Advice, title: str, path: Path) -> None:
    """Write the picture of an advice.

    Raises OSError when the file cannot be written. Raises ValueError when Matplotlib knows no such kind of file.
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
    costs.set_xlabel("GPUs that are reserved", color=_FAINT, fontsize=9)
    figure.savefig(path, dpi=130, facecolor=_PAPER)


def _draw_demand(panel: Axes, advice: Advice, most: int) -> None:
    """Draw the demand as a staircase: slot k lies between k − 1 and k."""
    best = advice.best.slots
    edges, shares = [0], []
    for slot in advice.slots:
        edges.append(slot.last)
        shares.append(slot.share_percent)
    if edges[-1] < most:
        edges.append(most)
        shares.append(0.0)
    # Cut at the advice, so that what works, what idles and what goes beyond are areas of their own.
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
    _style(panel, "part of the time with a demand of so many GPUs or more, %")
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
    _style(panel, f"cost of all of this time, {advice.rates.currency}")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 or not value else f"{value:.2f}")


def _style(panel: Axes, text: str) -> None:
    panel.set_facecolor(_PAPER)
    panel.set_title(text, loc="left", color=_INK, fontsize=10)
    panel.tick_params(colors=_FAINT, labelsize=8, length=2, labelcolor=_FAINT)
    for name, spine in panel.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_GRID)
    panel.set_axisbelow(True)
