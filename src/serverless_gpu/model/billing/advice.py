"""Advice from past use: how many GPUs to reserve, or to own, and which runs had more GPU than they used.

    uses (when, how many GPUs) ──▶ curve: for how long was the demand at least 1, 2, 3 … GPUs
                                      │   slot k of a reserved pool works for that long, and is paid for all of it
    price of a reserved GPU-hour ─────┼─▶ reserve slot k if and only if   time(demand ≥ k) ÷ all time
    price of one on demand, × the part┘                            is more than   reserved price ÷ on-demand price
    of the time had that is billed                                                (the newsvendor's rule)

That share falls with k, so the slots that pay are the first ones, and their number is the size that costs least. The
advice names what the rule leaves out: a slot is a GPU and no node, so a gang may be cut in two; tomorrow is as today.

    a device worked for less than 5 % of the time  ──▶ "this is CPU work"
    the most memory it used, and 20 % on top, fits  ──▶ a smaller GPU type: of those with a price the cheapest,
    a card with less                                    else those of the catalogue with the least memory

Runs of one user and name on one type are looked at together: a single run says little. Nothing is said where telemetry
saw less than half of the time, or less than ten minutes of it. Savings are at the prices of today and at the same
duration; a smaller card may be slower, and the advice names the factor from which on it saves nothing.

Formulas put the numbers of an advice into words. All numbers are integers of nanoseconds and micros; the caller chooses
whose use it is, and which prices hold.
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
"""By how much prices and demand are changed, to see whether the advice would change with them."""
_USES_MAX = 2_000_000
BUSY_MIN_PERCENT = 5
"""A device that works for a smaller part of the time is not needed."""
HEAD_ROOM_PERCENT = 20
"""What a card has to have beyond the most memory that was used."""
OBSERVED_MIN_MS = 600_000
_NAMED_MAX = 4


class GpuUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Some GPUs, from one moment until another; nanoseconds of any clock."""

    start_ns: int
    end_ns: int
    gpus: int


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """GPU demand over time."""

    span_ns: int  # all the time that was looked at
    levels: tuple[tuple[int, int], ...]  # GPUs, and for how long exactly so many were wanted; ascending, without 0

    @property
    def peak(self) -> int:
        """The most GPUs that were wanted at once."""
        return self.levels[-1][0] if self.levels else 0

    @property
    def used_ns(self) -> int:
        """GPU-nanoseconds of all uses together."""
        return sum(gpus * ns for gpus, ns in self.levels)

    def at_least_ns(self, gpus: int) -> int:
        """Return for how long so many GPUs, or more, were wanted."""
        return self.span_ns if gpus <= 0 else sum(ns for level, ns in self.levels if level >= gpus)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield each level, and for how long it or more was wanted; between two levels that is as at the upper one."""
        at_least = sum(ns for _, ns in self.levels)
        for level, ns in self.levels:
            yield level, at_least
            at_least -= ns

    def beyond_ns(self, slots: int) -> int:
        """Return the GPU-nanoseconds for which so many GPUs were too few."""
        return sum((level - slots) * ns for level, ns in self.levels if level > slots)

    def scaled(self, percent: int) -> Curve:
        """Return the curve with each level times a percentage, to the nearest GPU."""
        levels: dict[int, int] = {}
        for level, ns in self.levels:
            changed = (level * percent + 50) // 100
            if changed:
                levels[changed] = levels.get(changed, 0) + ns
        return Curve(span_ns=self.span_ns, levels=tuple(sorted(levels.items())))


class GpuRates(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of one GPU for one hour."""

    reserved: int  # micros, paid whether it is used or not
    on_demand: int  # micros, paid for the time that is billed
    currency: str = "USD"
    # The part of the time for which GPUs were had that is billed on demand: their environment and the start of their
    # processes are not, and take a slot of a reserved pool all the same.
    billed: Fraction = Fraction(1)

    @property
    def had(self) -> Fraction:
        """Micros that one GPU costs on demand for each hour for which it was had."""
        return self.on_demand * self.billed


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of some reserved GPUs with the rest on demand."""

    slots: int  # GPUs that are reserved
    reserved_micros: int
    idle_micros: int  # the part of that in which they stood idle; `idle_ns` the GPU-nanoseconds
    idle_ns: int
    on_demand_micros: int  # what the others cost; `on_demand_ns` the GPU-nanoseconds
    on_demand_ns: int
    duty_percent: float | None  # part of the reserved time that was used; None without slots

    @property
    def micros(self) -> int:
        """What both cost together."""
        return self.reserved_micros + self.on_demand_micros


class AdviceVariation(msgspec.Struct, frozen=True, kw_only=True):
    """The advice under a different assumption."""

    what: str  # what is different, in words
    best: Mix  # what would cost least then
    advised: Mix  # what the advice costs then, if it is followed all the same


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of a reserved pool that are wanted for equally long."""

    first: int  # the first of them, counted from 1; `last` the last
    last: int
    share_percent: float  # part of the time for which they are wanted
    pays: bool  # whether that is more than the break-even duty


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The number of GPUs to reserve, its cost and the alternatives."""

    gpu_type: str
    curve: Curve  # how much was wanted
    rates: GpuRates
    duty_percent: float  # break-even duty: a reserved GPU pays from this part of the time on
    best: Mix  # what costs least
    now: Mix  # what the slots there are today cost
    none: Mix
    all_reserved: Mix  # enough for the peak
    slots: tuple[Slot, ...]  # which slots pay
    changed: tuple[AdviceVariation, ...]  # whether it depends much on prices and demand


def curve_of(uses: Iterable[GpuUse], start_ns: int, end_ns: int) -> Curve:
    """Return how much was wanted, and for how long."""
    if end_ns <= start_ns:
        raise InvalidValue("there is no time between its beginning and its end")
    changes: dict[int, int] = {}
    for count, use in enumerate(uses):
        if count >= _USES_MAX:
            raise InvalidValue(f"more than {_USES_MAX:,} uses cannot be looked at", hint="look at less time: --last 7d")
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
    """Return how many GPUs to reserve: slot k if and only if it is wanted for more than the break-even duty."""
    best = 0
    for level, at_least_ns in curve.steps():
        if at_least_ns * rates.had <= curve.span_ns * rates.reserved:
            break
        best = level
    return best


def mix(curve: Curve, rates: GpuRates, slots: int) -> Mix:
    """Return what some reserved GPUs cost, and those that are missing on demand; each sum is rounded up once."""
    if slots < 0:
        raise InvalidValue(f"{slots} GPUs cannot be reserved")
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
    """Return what GPU-nanoseconds cost, rounded up to a whole micro."""
    return -(-gpu_ns * micros_per_hour // HOUR_NS)


def advise(curve: Curve, rates: GpuRates, *, gpu_type: str = "", now: int = 0) -> Advice:
    """Return how many GPUs to reserve.

    Raises InvalidValue when a price is negative, or what is paid by the hour is free, so that nothing can be compared
    with it.
    """
    if rates.reserved < 0 or rates.had <= 0:
        raise InvalidValue(
            "prices of 0 and more are needed, and the one on demand is more than 0",
            hint="give the price of one GPU for one hour: --reserved 1.90 --on-demand 2.99",
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
    """The devices of one attempt, and its use of them."""

    owner: str
    name: str
    gpu_type: str
    gpu_ms: int  # device-milliseconds that it used
    observed_ms: int = 0  # of those, how many telemetry saw; `busy_ms` those in which a device worked
    busy_ms: int = 0
    peak_memory_bytes: int | None = None  # the most of one device; None when that is not known


class OversizedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that some runs could do without."""

    owner: str
    name: str
    gpu_type: str
    runs: int  # attempts that were looked at
    gpu_ms: int  # what they used; `micros` what that costs today, None without a price
    micros: int | None
    busy_percent: float  # part of the time in which a device worked
    peak_memory_bytes: int | None  # the most of one device
    verdict: Verdict  # `"cpu"` or `"smaller"`
    types: tuple[str, ...]  # what would do instead; with prices the cheapest, else the smallest of the catalogue
    saves_micros: int | None = None  # what that would save at the same duration; None where a price is missing
    # How many times slower the smaller type may be before it costs more; None where a price is missing.
    slower: float | None = None

    def text(self) -> str:
        """Return the finding in words."""
        if self.verdict == "cpu":
            return f"this is CPU work: GPUs worked {self.busy_percent:.1f} % of the time"
        assert self.peak_memory_bytes is not None
        several = " or ".join(self.types)
        slower = "" if self.slower is None else f", if it takes less than {self.slower:.1f} times as long"
        return f"{units.format_gpu_memory(self.peak_memory_bytes)} of memory at most: {several} would do{slower}"


def oversized_runs(
    ran: Iterable[ObservedAttempt], prices: Mapping[str, int], own: Sequence[GpuType] = ()
) -> tuple[OversizedRuns, ...]:
    """Return the runs that had more GPU than they used; those that would save most first.

    `prices` are micros of one device for one hour, by type.
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
    """Yield the types that would do: the cheapest that is cheaper, else those with the least memory that have less."""
    known = {each.name: each for each in (*CATALOGUE, *own) if each.name not in FAMILIES and each.name != CPU}
    fits = [each for each in known.values() if each.memory_bytes >= needed]
    name = canonical(gpu_type, own)
    now = prices.get(name)
    if now is not None and any(each in prices for each in known if each != name):
        # Where others have prices, these are the types there are: a card that is not on offer saves nothing.
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
    """Return the formulas of everything about reserved GPUs, by the name of the number."""
    return dict(_formulas(advice))


def formulas_of_queues() -> dict[str, str]:
    """Return the formulas of pools without on-demand GPUs."""
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
