"""Advice from past usage: the number of GPUs to reserve or buy, and runs on oversized GPUs.

    uses (time, GPUs) ────────────▶ curve: the time with a demand of at least 1, 2, 3 … GPUs
                                      │   slot k of a reserved pool works for that time and costs money all the time
    reserved price of a GPU-hour ─────┼─▶ reserve slot k if and only if   time(demand ≥ k) ÷ all time
    on-demand price of a GPU-hour     │                            is more than   reserved price ÷ on-demand price
    × the billed share of the time ───┘                                           (the newsvendor rule)

Only the lowest-numbered slots pay off, because the time with a demand of at least k GPUs decreases as k grows. The
number of slots that pay off is the cheapest pool size. The newsvendor rule has two limitations. The reserved slots may
fit only some ranks of a gang, because a slot is one GPU and not a node. The rule also assumes that future demand equals
past demand.

    a device worked for less than 5 % of the time  ──▶ "this is CPU work"
    a card with less memory holds the peak memory   ──▶ a smaller GPU type: the cheapest one with a price,
    and 20 % more                                       else the catalogue's types with the least memory

The advice groups runs by user, name and GPU type, because a single run is weak evidence. The advice skips an attempt
when telemetry covers less than half of the attempt's time. The advice skips a group with less than ten minutes of
telemetry. Savings assume today's prices and the same duration. The advice states the slowdown that cancels the saving,
because a smaller card may be slower.

`formulas` explains how the advice calculates its numbers. All amounts are integers in nanoseconds and micros
(millionths of the currency unit). The caller selects the usage to analyze and the prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Literal

import msgspec

from serverless_gpu import units
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.calendars import HOUR_NS
from serverless_gpu.model.hardware import CATALOGUE, CPU, FAMILIES, GpuType, canonical, find_type, is_listed
from serverless_gpu.units import MICROS_PER_UNIT, format_micros

Verdict = Literal["cpu", "smaller"]
CHANGE_PERCENT = 20
"""Percentage by which prices and demand vary to test how sensitive the advice is."""
_USES_MAX = 2_000_000
BUSY_MIN_PERCENT = 5
"""Minimum busy percentage of a run that needs a GPU. Runs with less busy devices need no GPU."""
HEAD_ROOM_PERCENT = 20
"""Percentage by which a smaller card's memory must exceed the runs' peak memory."""
OBSERVED_MIN_MS = 600_000
_NAMED_MAX = 4


class GpuUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A number of GPUs in use from a start time to an end time, in nanoseconds of any clock."""

    start_ns: int
    end_ns: int
    gpus: int


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """GPU demand over time."""

    span_ns: int  # The whole time range that the curve covers, in nanoseconds.
    # Pairs of a GPU count and the nanoseconds with exactly that demand, in ascending order and without 0.
    levels: tuple[tuple[int, int], ...]

    @property
    def peak(self) -> int:
        """Return the highest number of GPUs in demand at the same time."""
        return self.levels[-1][0] if self.levels else 0

    @property
    def used_ns(self) -> int:
        """Return the GPU-nanoseconds of demand in the whole time range."""
        return sum(gpus * ns for gpus, ns in self.levels)

    def at_least_ns(self, gpus: int) -> int:
        """Return the nanoseconds with a demand of at least this many GPUs."""
        return self.span_ns if gpus <= 0 else sum(ns for level, ns in self.levels if level >= gpus)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield each GPU count of the curve, and the nanoseconds with at least that demand.

        For a GPU count between two levels, the time of the upper level applies.
        """
        at_least = sum(ns for _, ns in self.levels)
        for level, ns in self.levels:
            yield level, at_least
            at_least -= ns

    def beyond_ns(self, slots: int) -> int:
        """Return the GPU-nanoseconds of demand beyond this number of slots."""
        return sum((level - slots) * ns for level, ns in self.levels if level > slots)

    def scaled(self, percent: int) -> Curve:
        """Return the curve with each level scaled by a percentage and rounded to the nearest GPU."""
        levels: dict[int, int] = {}
        for level, ns in self.levels:
            changed = (level * percent + 50) // 100
            if changed:
                levels[changed] = levels.get(changed, 0) + ns
        return Curve(span_ns=self.span_ns, levels=tuple(sorted(levels.items())))


class GpuRates(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of one GPU for one hour."""

    reserved: int  # Micros (millionths of the currency unit) per reserved GPU-hour, whether the GPU is used or not.
    on_demand: int  # Micros (millionths of the currency unit) per billed GPU-hour on demand.
    currency: str = "USD"
    # Billed share of the allocated on-demand time. The server bills neither the preparation of the environment nor the
    # start of processes. Unbilled time also occupies a slot of a reserved pool.
    billed: Fraction = Fraction(1)

    @property
    def had(self) -> Fraction:
        """Return the micros that one on-demand GPU costs per hour of allocated time."""
        return self.on_demand * self.billed


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a fixed number of reserved GPUs when on-demand GPUs serve all further demand."""

    slots: int  # Number of reserved GPUs.
    reserved_micros: int
    idle_micros: int  # Cost of the reserved GPUs' idle time. `idle_ns` is the idle time in GPU-nanoseconds.
    idle_ns: int
    on_demand_micros: int  # Cost of the on-demand GPUs. `on_demand_ns` is the on-demand time in GPU-nanoseconds.
    on_demand_ns: int
    duty_percent: float | None  # Used share of the reserved GPU time, or None without reserved GPUs.

    @property
    def micros(self) -> int:
        """Return the total cost of reserved and on-demand GPUs."""
        return self.reserved_micros + self.on_demand_micros


class AdviceVariation(msgspec.Struct, frozen=True, kw_only=True):
    """The advice under a changed assumption about prices or demand."""

    what: str  # The changed assumption, as text for the user.
    best: Mix  # The cheapest mix of reserved and on-demand GPUs under the changed assumption.
    advised: Mix  # Cost of the originally advised mix under the changed assumption.


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive slots of a reserved pool with equal demand time."""

    first: int  # Number of the group's lowest slot, counted from 1. `last` is the number of the group's highest slot.
    last: int
    share_percent: float  # Percentage of the time in which the demand reaches the slots.
    pays: bool  # True if the slots' demand time is above the break-even duty.


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The number of GPUs to reserve, the cost, and the alternatives."""

    gpu_type: str
    curve: Curve  # The measured GPU demand over time.
    rates: GpuRates
    duty_percent: float  # Break-even duty: the percentage of the time above which a reserved GPU pays off.
    best: Mix  # The cheapest mix of reserved and on-demand GPUs.
    now: Mix  # Cost with today's number of reserved GPUs.
    none: Mix
    all_reserved: Mix  # Cost with enough reserved GPUs for the peak demand.
    slots: tuple[Slot, ...]  # The reserved slots with their demand time, and a flag for slots that pay off.
    changed: tuple[AdviceVariation, ...]  # The sensitivity of the advice to prices and demand.


def curve_of(uses: Iterable[GpuUse], start_ns: int, end_ns: int) -> Curve:
    """Return the GPU demand over time, from periods of GPU usage."""
    if end_ns <= start_ns:
        raise InvalidValue("the time range is empty, because its end is not after its start")
    changes: dict[int, int] = {}
    for count, use in enumerate(uses):
        if count >= _USES_MAX:
            raise InvalidValue(
                f"the time range has more than the maximum of {_USES_MAX:,} GPU uses",
                hint="choose a shorter time range: --last 7d",
            )
        begin, end = max(use.start_ns, start_ns), min(use.end_ns, end_ns)
        if begin < end and use.gpus > 0:
            changes[begin] = changes.get(begin, 0) + use.gpus
            changes[end] = changes.get(end, 0) - use.gpus
    levels: dict[int, int] = {}
    wanted, since = 0, start_ns
    for at_ns in sorted(changes):
        if wanted:
            levels[wanted] = levels.get(wanted, 0) + at_ns - since
        wanted, since = wanted + changes[at_ns], at_ns
    return Curve(span_ns=end_ns - start_ns, levels=tuple(sorted(levels.items())))


def best_slots(curve: Curve, rates: GpuRates) -> int:
    """Return the number of GPUs to reserve: slots whose demand time is above the break-even duty."""
    best = 0
    for level, at_least_ns in curve.steps():
        if at_least_ns * rates.had <= curve.span_ns * rates.reserved:
            break
        best = level
    return best


def mix(curve: Curve, rates: GpuRates, slots: int) -> Mix:
    """Return the cost of `slots` reserved GPUs, with on-demand GPUs for all further demand.

    The function rounds each cost up once, after adding all times.
    """
    if slots < 0:
        raise InvalidValue(f"cannot reserve {slots} GPUs: the number is negative")
    beyond_ns = curve.beyond_ns(slots)
    had_ns = slots * curve.span_ns
    used_ns = curve.used_ns - beyond_ns
    return Mix(
        slots=slots,
        reserved_micros=micros_of(had_ns, rates.reserved),
        idle_micros=micros_of(had_ns - used_ns, rates.reserved),
        idle_ns=had_ns - used_ns,
        on_demand_micros=micros_of(beyond_ns, rates.had),
        on_demand_ns=beyond_ns,
        duty_percent=100 * used_ns / had_ns if had_ns else None,
    )


def micros_of(gpu_ns: int, micros_per_hour: int | Fraction) -> int:
    """Return the cost of GPU-nanoseconds, rounded up to a whole micro."""
    return -(-gpu_ns * micros_per_hour // HOUR_NS)


def advise(curve: Curve, rates: GpuRates, *, gpu_type: str = "", now: int = 0) -> Advice:
    """Return the advice on the number of GPUs to reserve.

    Raises InvalidValue when a price is negative. An on-demand price of 0 also raises InvalidValue, because the
    break-even duty divides by that price.
    """
    if rates.reserved < 0 or rates.had <= 0:
        raise InvalidValue(
            "the reserved price must not be negative, and the on-demand price must be more than 0",
            hint="set the price of one GPU-hour with --reserved 1.90 --on-demand 2.99",
        )
    best = mix(curve, rates, best_slots(curve, rates))
    slots: list[Slot] = []
    before = 0
    for level, at_least_ns in curve.steps():
        share = 100 * at_least_ns / curve.span_ns
        slots.append(Slot(first=before + 1, last=level, share_percent=share, pays=level <= best.slots))
        before = level
    return Advice(
        gpu_type=gpu_type,
        curve=curve,
        rates=rates,
        duty_percent=float(100 * rates.reserved / rates.had),
        best=best,
        now=mix(curve, rates, now),
        none=mix(curve, rates, 0),
        all_reserved=mix(curve, rates, curve.peak),
        slots=tuple(slots),
        changed=tuple(_changed(curve, rates, best.slots)),
    )


def _changed(curve: Curve, rates: GpuRates, slots: int) -> Iterator[AdviceVariation]:
    lower, higher = 100 - CHANGE_PERCENT, 100 + CHANGE_PERCENT
    for percent in (lower, higher):
        other = msgspec.structs.replace(rates, reserved=rates.reserved * percent // 100)
        yield _change(f"reserved price {_sign(percent)}", curve, other, slots)
    for percent in (lower, higher):
        other = msgspec.structs.replace(rates, on_demand=max(1, rates.on_demand * percent // 100))
        yield _change(f"on-demand price {_sign(percent)}", curve, other, slots)
    for percent in (lower, higher):
        yield _change(f"demand {_sign(percent)}", curve.scaled(percent), rates, slots)


def _sign(percent: int) -> str:
    return f"{'−' if percent < 100 else '+'}{CHANGE_PERCENT} %"


def _change(what: str, curve: Curve, rates: GpuRates, slots: int) -> AdviceVariation:
    return AdviceVariation(
        what=what, best=mix(curve, rates, best_slots(curve, rates)), advised=mix(curve, rates, slots)
    )


class ObservedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one attempt, with their busy time and peak memory."""

    owner: str
    name: str
    gpu_type: str
    gpu_ms: int  # Device-milliseconds of the attempt's usage.
    # Device-milliseconds with telemetry. `busy_ms` counts the milliseconds in which a device was busy.
    observed_ms: int = 0
    busy_ms: int = 0
    peak_memory_bytes: int | None = None  # Highest memory usage of any device in bytes, or None when unknown.


class OversizedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """A group of runs that a CPU or a smaller GPU type can serve."""

    owner: str
    name: str
    gpu_type: str
    runs: int  # Number of attempts in the group.
    # Device-milliseconds that the runs used. `micros` is the runs' cost at today's price, or None without a price.
    gpu_ms: int
    micros: int | None
    busy_percent: float  # Percentage of the time in which the devices were busy.
    peak_memory_bytes: int | None  # Highest memory usage of any device, in bytes.
    verdict: Verdict  # Recommended replacement, either `"cpu"` or `"smaller"` (a smaller GPU type).
    # Suggested GPU types with enough memory, the cheapest priced type or else the catalogue's smallest types.
    types: tuple[str, ...]
    saves_micros: int | None = None  # Savings in micros if the runs take the same time, or None if a price is missing.
    # Slowdown factor of the smaller GPU type that cancels the savings, or None if a price is missing.
    slower: float | None = None

    def text(self) -> str:
        """Return the recommendation as text for users."""
        if self.verdict == "cpu":
            return f"this is CPU work: GPUs worked {self.busy_percent:.1f} % of the time"
        assert self.peak_memory_bytes is not None
        several = " or ".join(self.types)
        slower = "" if self.slower is None else f", if the runs take less than {self.slower:.1f} times as long"
        return (
            f"the runs use at most {units.format_gpu_memory(self.peak_memory_bytes)}, so {several} is large "
            f"enough{slower}"
        )


def oversized_runs(
    ran: Iterable[ObservedAttempt], prices: Mapping[str, int], own: Sequence[GpuType] = ()
) -> tuple[OversizedRuns, ...]:
    """Return the groups of runs on oversized GPUs, sorted by savings in descending order.

    `prices` maps each device type to the micros per device-hour.
    """
    groups: dict[tuple[str, str, str], list[ObservedAttempt]] = {}
    for each in ran:
        if canonical(each.gpu_type, own) != CPU:
            groups.setdefault((each.owner, each.name, each.gpu_type), []).append(each)
    book = {canonical(name, own): micros for name, micros in prices.items()}
    found = [judged for group in groups.values() if (judged := _judged(group, book, own)) is not None]
    found = [each for each in found if each.saves_micros is None or each.saves_micros > 0]
    return tuple(sorted(found, key=lambda each: (-(each.saves_micros or 0), -each.gpu_ms, each.owner, each.name)))


def _judged(
    group: Sequence[ObservedAttempt], prices: Mapping[str, int], own: Sequence[GpuType]
) -> OversizedRuns | None:
    seen = [each for each in group if each.observed_ms > 0 and 2 * each.observed_ms >= each.gpu_ms]
    observed_ms = sum(each.observed_ms for each in seen)
    if observed_ms < OBSERVED_MIN_MS:
        return None
    busy_percent = 100 * sum(min(each.busy_ms, each.observed_ms) for each in seen) / observed_ms
    peaks = [each.peak_memory_bytes for each in seen]
    known = [peak for peak in peaks if peak is not None]
    gpu_ms, now = sum(each.gpu_ms for each in seen), prices.get(canonical(group[0].gpu_type, own))
    found = OversizedRuns(
        owner=group[0].owner,
        name=group[0].name,
        gpu_type=group[0].gpu_type,
        runs=len(seen),
        gpu_ms=gpu_ms,
        micros=None if now is None else units.micros_for(gpu_ms, now),
        busy_percent=busy_percent,
        peak_memory_bytes=max(known, default=None),
        verdict="cpu",
        types=(CPU,),
    )
    if busy_percent < BUSY_MIN_PERCENT:
        return _saving(found, now, prices.get(CPU))
    if not known or len(known) < len(peaks):
        return None
    needed = -(-max(known) * (100 + HEAD_ROOM_PERCENT) // 100)
    types = tuple(_smaller(group[0].gpu_type, needed, prices, own))
    if not types:
        return None
    return _saving(msgspec.structs.replace(found, verdict="smaller", types=types), now, prices.get(types[0]))


def _saving(found: OversizedRuns, now: int | None, then: int | None) -> OversizedRuns:
    if found.micros is None or now is None or then is None:
        return found
    saves = found.micros - units.micros_for(found.gpu_ms, then)
    slower = now / then if then and found.verdict == "smaller" else None
    return msgspec.structs.replace(found, saves_micros=saves, slower=slower)


def _smaller(gpu_type: str, needed: int, prices: Mapping[str, int], own: Sequence[GpuType]) -> Iterator[str]:
    """Yield the smaller GPU types that have enough memory for the runs.

    With prices, the function yields the cheapest type that costs less. Without prices, the function yields the types
    with the least memory.
    """
    known = {each.name: each for each in (*CATALOGUE, *own) if each.name not in FAMILIES and each.name != CPU}
    fits = [each for each in known.values() if each.memory_bytes >= needed]
    name = canonical(gpu_type, own)
    now = prices.get(name)
    if now is not None and any(each in prices for each in known if each != name):
        # The price book defines the GPU types that the operator offers. If prices exist, the advice never suggests a
        # type without a price.
        cheaper = [each for each in fits if prices.get(each.name, now) < now]
        if cheaper:
            yield min(cheaper, key=lambda each: (prices[each.name], each.memory_bytes, each.name)).name
        return
    if not is_listed(gpu_type, own):
        return
    memory = find_type(gpu_type, own).memory_bytes
    less = sorted(
        (each for each in fits if each.memory_bytes < memory), key=lambda each: (each.memory_bytes, each.name)
    )
    least = [each.name for each in less if each.memory_bytes == less[0].memory_bytes]
    yield from least[:_NAMED_MAX]


def formulas(advice: Advice) -> dict[str, str]:
    """Return the formulas behind the advice on reserved GPUs, by the name of the calculated number."""
    return dict(_formulas(advice))


def formulas_of_queues() -> dict[str, str]:
    """Return the formulas behind the advice for pools without on-demand GPUs."""
    return {
        "GPU time waited": "the sum of hours waited × GPUs over all runs, in a replay that starts fitting runs in "
        "order of submission, without preemption",
        "waiting costs": "GPU time waited × --waiting, the price of one GPU-hour of waiting",
        "on demand instead": "the on-demand cost of the demand beyond the pool, if no run waits",
        "worth it below": "on demand instead ÷ GPU time waited, the price of a GPU-hour of waiting below which waiting "
        "is cheaper",
    }


def formulas_of_runs() -> dict[str, str]:
    """Return the formulas behind the advice on runs with oversized GPUs."""
    return {
        "busy": "time in which a device worked ÷ time with telemetry, over the runs of one user, name and GPU type",
        "CPU work": f"the busy share of the runs is less than {BUSY_MIN_PERCENT} %",
        "would do": f"the cheapest priced GPU type whose memory is at least {100 + HEAD_ROOM_PERCENT} % of a device's "
        "peak memory",
        "saves": "GPU-hours × (price of the type in use − price of the suggested type), at today's prices and the "
        "same duration",
        "times as long": "price of the type in use ÷ price of the suggested type",
    }


def hours(ns: int) -> str:
    """Return nanoseconds as hours, such as ``1,234.5``."""
    return f"{ns / HOUR_NS:,.1f}"


def price(micros: int) -> str:
    """Return a price without its currency and with at least two decimals, such as ``0.0345``."""
    units, rest = divmod(micros, MICROS_PER_UNIT)
    return f"{units:,}.{f'{rest:06d}'.rstrip('0').ljust(2, '0')}"


def percent(part: Fraction) -> str:
    """Return a fraction as a percentage, such as ``54.7 %``."""
    return f"{float(100 * part):.1f} %"


def _formulas(advice: Advice) -> Iterator[tuple[str, str]]:
    curve, rates, best = advice.curve, advice.rates, advice.best
    mean = curve.used_ns / curve.span_ns
    yield (
        "demand",
        "the total GPUs of all runs, as if each run had started at its submission and kept its GPUs for its actual "
        "GPU time",
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
        "billed share",
        "billed GPU time ÷ allocated GPU time, which includes preparing the environment and starting processes, "
        f"= {percent(rates.billed)}",
    )
    yield "wanted", "for slot k: time with a demand of k GPUs or more ÷ all time"
    around = [slot for slot in (best.slots, best.slots + 1) if slot > 0]
    shares = ", ".join(f"slot {slot} {100 * curve.at_least_ns(slot) / curve.span_ns:.1f} %" for slot in around)
    yield (
        "pays",
        (f"slot k pays if and only if its wanted share is more than the break-even duty (newsvendor rule): {shares}"),
    )
    amount = format_micros(best.reserved_micros, rates.currency)
    product = f"{best.slots} × {hours(curve.span_ns)} × {price(rates.reserved)} = {amount}"
    yield "reserved", f"GPUs × hours × reserved price = {product}"
    yield (
        "of that idle",
        f"(GPUs × hours − GPU-hours in use) × reserved price = {hours(best.idle_ns)} × {price(rates.reserved)} = "
        f"{format_micros(best.idle_micros, rates.currency)}",
    )
    yield (
        "on demand",
        "the sum of (demand − GPUs) × time over the times of higher demand, × on-demand "
        f"price{_times_part(rates)} = {hours(best.on_demand_ns)} × {_on_demand(rates)} = "
        f"{format_micros(best.on_demand_micros, rates.currency)}",
    )
    yield "together", f"reserved + on demand = {format_micros(best.micros, rates.currency)}"
    yield "duty", "GPU-hours in use on the reserved GPUs ÷ (GPUs × hours)"
    yield (
        "if",
        "the same calculation with a changed price or demand, where similar values in the last two columns mean "
        "robust advice",
    )
    yield (
        "left out",
        "the reserved slots may fit only a part of a gang, because a slot is one GPU and not a node. The rule assumes "
        "that future demand equals past demand",
    )


def _times_part(rates: GpuRates) -> str:
    return "" if rates.billed == 1 else " × billed share"


def _on_demand(rates: GpuRates) -> str:
    known = price(rates.on_demand)
    return known if rates.billed == 1 else f"({known} × {percent(rates.billed)})"
