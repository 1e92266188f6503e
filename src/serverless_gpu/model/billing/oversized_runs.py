"""Runs that had more GPU than they used: those that are CPU work, and those for which a smaller type would do.

    a device worked for less than 5 % of the time  ──▶ "this is CPU work"
    the most memory it used, and 20 % on top, fits  ──▶ a smaller GPU type: of those with a price the cheapest,
    a card with less                                    else those of the catalogue with the least memory

Runs of one user and name on one type are looked at together: a single run says little. Nothing is said where telemetry
saw less than half of the time, or less than ten minutes of it. What would be saved is at the prices of today and at the
same duration; a smaller card may be slower, and from which factor on it saves nothing is said with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from serverless_gpu import units
from serverless_gpu.model.hardware import CATALOGUE, CPU, FAMILIES, GpuType, canonical, find_type, is_listed

BUSY_MIN_PERCENT = 5
"""A device that works for a smaller part of the time is not needed."""
HEAD_ROOM_PERCENT = 20
"""What a card has to have beyond the most memory that was used."""
OBSERVED_MIN_MS = 600_000
_NAMED_MAX = 4

Verdict = Literal["cpu", "smaller"]


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one attempt, and its use of them."""

    owner: str
    name: str
    gpu_type: str
    gpu_ms: int  # device-milliseconds that it used
    observed_ms: int = 0  # of those, how many telemetry saw; `busy_ms` those in which a device worked
    busy_ms: int = 0
    peak_memory_bytes: int | None = None  # the most of one device; None when that is not known


class Unneeded(msgspec.Struct, frozen=True, kw_only=True):
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
        """Return what there is to say, in words."""
        if self.verdict == "cpu":
            return f"this is CPU work: GPUs worked {self.busy_percent:.1f} % of the time"
        assert self.peak_memory_bytes is not None
        several = " or ".join(self.types)
        slower = "" if self.slower is None else f", if it takes less than {self.slower:.1f} times as long"
        return f"{units.format_gpu_memory(self.peak_memory_bytes)} of memory at most: {several} would do{slower}"


def unneeded(ran: Iterable[Ran], prices: Mapping[str, int], own: Sequence[GpuType] = ()) -> tuple[Unneeded, ...]:
    """Return the runs that had more GPU than they used; those that would save most first.

    `prices` are micros of one device for one hour, by type.
    """
    groups: dict[tuple[str, str, str], list[Ran]] = {}
    for each in ran:
        if canonical(each.gpu_type, own) != CPU:
            groups.setdefault((each.owner, each.name, each.gpu_type), []).append(each)
    book = {canonical(name, own): micros for name, micros in prices.items()}
    found = [judged for group in groups.values() if (judged := _judged(group, book, own)) is not None]
    found = [each for each in found if each.saves_micros is None or each.saves_micros > 0]
    return tuple(sorted(found, key=lambda each: (-(each.saves_micros or 0), -each.gpu_ms, each.owner, each.name)))


def _judged(group: Sequence[Ran], prices: Mapping[str, int], own: Sequence[GpuType]) -> Unneeded | None:
    seen = [each for each in group if each.observed_ms > 0 and 2 * each.observed_ms >= each.gpu_ms]
    observed_ms = sum(each.observed_ms for each in seen)
    if observed_ms < OBSERVED_MIN_MS:
        return None
    busy_percent = 100 * sum(min(each.busy_ms, each.observed_ms) for each in seen) / observed_ms
    peaks = [each.peak_memory_bytes for each in seen]
    known = [peak for peak in peaks if peak is not None]
    gpu_ms, now = sum(each.gpu_ms for each in seen), prices.get(canonical(group[0].gpu_type, own))
    found = Unneeded(
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


def _saving(found: Unneeded, now: int | None, then: int | None) -> Unneeded:
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
