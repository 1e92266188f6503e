"""Formulas of an advice in words, with the numbers put in."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from serverless_gpu.model.billing.advice import Advice, GpuRates
from serverless_gpu.model.billing.oversized_runs import BUSY_MIN_PERCENT, HEAD_ROOM_PERCENT
from serverless_gpu.model.utc_days import HOUR_NS
from serverless_gpu.units import MICROS_PER_UNIT, format_micros


def formulas(advice: Advice) -> dict[str, str]:
    """Return the formulas of everything about reserved GPUs, by the name of the number."""
    return dict(_formulas(advice))


def formulas_of_queues() -> dict[str, str]:
    """Return the formulas of pools that send nobody on demand."""
    return {
        "GPU time waited": "the sum over all runs of hours waited × GPUs, in a replay of them on so many GPUs: "
        "in the order in which they were asked for, what does not fit is skipped, nobody is stopped",
        "waiting costs": "GPU time waited × --waiting, the price of waiting one hour for one GPU",
        "on demand instead": "what the GPUs that were missing would have cost, as without a queue",
        "worth it below": "on demand instead ÷ GPU time waited: while a GPU-hour of waiting costs less, it is cheaper "
        "to wait",
    }


def formulas_of_runs() -> dict[str, str]:
    """Return the formulas of runs that had more GPU than they used."""
    return {
        "busy": "time in which a device worked ÷ time that telemetry saw, over the runs of one user, name and GPU type",
        "CPU work": f"busy is less than {BUSY_MIN_PERCENT} %",
        "would do": f"the most memory that a device used × {100 + HEAD_ROOM_PERCENT} % is no more than the type has; "
        "of those with a price the cheapest",
        "saves": "GPU-hours × (price of the type it had − price of the type that would do), at today's prices and the "
        "same duration",
        "times as long": "price of the type it had ÷ price of the type that would do",
    }


def hours(ns: int) -> str:
    """Return nanoseconds as hours: ``1,234.5``."""
    return f"{ns / HOUR_NS:,.1f}"


def price(micros: int) -> str:
    """Return a price without its currency, with as many digits as it has: ``1.90``, ``0.0345``."""
    units, rest = divmod(micros, MICROS_PER_UNIT)
    return f"{units:,}.{f'{rest:06d}'.rstrip('0').ljust(2, '0')}"


def percent(part: Fraction) -> str:
    """Return a part of 1 in per cent: ``54.7 %``."""
    return f"{float(100 * part):.1f} %"


def _formulas(advice: Advice) -> Iterator[tuple[str, str]]:
    curve, rates, best = advice.curve, advice.rates, advice.best
    mean = curve.used_ns / curve.span_ns
    yield (
        "demand",
        "GPUs that all runs together had, each from the moment it was asked for and for as long as it had them: "
        "as if nobody had waited",
    )
    yield (
        "mean demand",
        f"GPU-hours ÷ hours = {hours(curve.used_ns)} ÷ {hours(curve.span_ns)} = {mean:.2f}",
    )
    yield (
        "break-even duty",
        f"reserved price ÷ on-demand price{_times_part(rates)} = {price(rates.reserved)} ÷ {_on_demand(rates)}"
        f" = {advice.duty_percent:.1f} %",
    )
    yield (
        "part that is billed",
        "GPU time that was billed ÷ GPU time for which GPUs were had: environment and start are not billed, and take a "
        f"slot of a reserved pool all the same = {percent(rates.billed)}",
    )
    yield "wanted", "for slot k: time with a demand of k GPUs or more ÷ all time"
    around = [slot for slot in (best.slots, best.slots + 1) if slot > 0]
    shares = ", ".join(f"slot {slot} {100 * curve.at_least_ns(slot) / curve.span_ns:.1f} %" for slot in around)
    yield "pays", f"slot k pays if and only if wanted is more than the break-even duty (newsvendor): {shares}"
    amount = format_micros(best.reserved_micros, rates.currency)
    product = f"{best.slots} × {hours(curve.span_ns)} × {price(rates.reserved)} = {amount}"
    yield "reserved", f"GPUs × hours × reserved price = {product}"
    yield (
        "of that idle",
        "(GPUs × hours − GPU-hours that they worked) × reserved price = "
        f"{hours(best.idle_ns)} × {price(rates.reserved)} = {format_micros(best.idle_micros, rates.currency)}",
    )
    yield (
        "on demand",
        f"the sum of (demand − GPUs) × time while the demand is more, × on-demand price{_times_part(rates)} = "
        f"{hours(best.on_demand_ns)} × {_on_demand(rates)} = "
        f"{format_micros(best.on_demand_micros, rates.currency)}",
    )
    yield "together", f"reserved + on demand = {format_micros(best.micros, rates.currency)}"
    yield "duty", "GPU-hours that the reserved GPUs worked ÷ (GPUs × hours)"
    yield (
        "if",
        "the same with one price, or each level of the demand, changed; the advice stays good while the last two "
        "columns are near each other",
    )
    yield (
        "left out",
        "a slot is one GPU and not a node, so a gang may be cut in two; tomorrow is taken to be as yesterday was",
    )


def _times_part(rates: GpuRates) -> str:
    return "" if rates.billed == 1 else " × part that is billed"


def _on_demand(rates: GpuRates) -> str:
    known = price(rates.on_demand)
    return known if rates.billed == 1 else f"({known} × {percent(rates.billed)})"
