"""Metering: an attempt's time segments per day, computed from facts, and their billed part.

    reserved    starting    exec    alive ... alive    stopping    exited    freed
    ├ environment ┼─ start ──┼────────── run ─────────────┼── stop ──┼── gate ──┤
                             ├──────────────── counts as use ───────────────────┤
                             ├────── billed: up to `stopping` + grace ──────┤       where the server requested a stop
    without `freed`: the end is `exited`, else the last fact

A session holds devices between runs. A `held` fact starts idle time. A `freed` fact ends idle time. Each set of idle
devices has a separate pair of facts, so that the meter counts no device twice.

    reserved   held    freed ─ a run has them, and its own facts ─ held    freed
               ├─ idle ──┤                                          ├─ idle ─┤

Durations are whole milliseconds of the boot clock. For each uninterrupted period, the meter uses only the wall clock
time of the period's first fact. The meter derives all later dates of the period from the boot clock.

Failure cases: After a node goes silent or reboots, the metered time ends at the last report, in the user's favour. The
module never compares boot times of different boots. If the fact that starts a segment is missing, the segment's time
counts toward the preceding segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind

STRETCH_NS_MAX = 400 * DAY_NS
"""Maximum length of an uninterrupted period. A longer period indicates a wrong clock."""
SEGMENTS = ("environment_ms", "start_ms", "run_ms", "stop_ms", "gate_ms", "idle_ms")
"""The segments of device time, in chronological order."""
_ENVIRONMENT, _START, _RUN, _STOP, _GATE, _IDLE = range(len(SEGMENTS))
FIRST_USED = _RUN
"""Index of the first segment that counts as device usage."""
_MS_NS = 1_000_000
_CPU_SLOT = "CPU-"  # Prefix of CPU slot identifiers. A CPU slot is a core that the server bills as a device.
_OPENING = frozenset({FactKind.RESERVED, FactKind.HYDRATING, FactKind.STARTING, FactKind.EXEC, FactKind.HELD})


class _Stretch:
    """An uninterrupted period in which an attempt has devices, from the first fact until release."""

    __slots__ = (
        "began_ns",
        "boot_id",
        "cores",
        "exited_ns",
        "gpus",
        "last_ns",
        "memory_mib",
        "starting_ns",
        "stopping_ns",
        "until_ns",
        "used_ns",
        "uuids",
        "wall_ns",
        "was_idle",
    )

    def __init__(self, fact: Fact) -> None:
        self.boot_id = fact.boot_id
        self.began_ns = self.last_ns = fact.boottime_ns
        self.wall_ns = fact.wall_ns
        self.was_idle = fact.kind is FactKind.HELD
        self.used_ns: int | None = fact.boottime_ns if self.was_idle else None
        self.starting_ns: int | None = None
        self.stopping_ns: int | None = None
        self.until_ns: int | None = None
        self.exited_ns: int | None = None
        self.lend(fact)
        self.see(fact)

    def lend(self, fact: Fact) -> None:
        """Record the devices, cores and memory of a fact."""
        self.uuids = frozenset(fact.gpus)
        self.gpus = len(self.uuids)
        self.cores = max(0, fact.cpus - sum(uuid.startswith(_CPU_SLOT) for uuid in self.uuids))
        self.memory_mib = max(0, fact.memory_bytes) >> 20

    def see(self, fact: Fact) -> None:
        """Record a fact. Only the first fact of each kind changes a period."""
        at_ns = fact.boottime_ns
        self.last_ns = max(self.last_ns, at_ns)
        match fact.kind:
            case FactKind.STARTING if self.starting_ns is None:
                self.starting_ns = at_ns
            case FactKind.EXEC if self.used_ns is None:
                self.used_ns = at_ns
                self.lend(fact)
            case FactKind.STOPPING if self.stopping_ns is None:
                self.stopping_ns = at_ns
                if fact.grace_ms is not None:
                    self.until_ns = at_ns + max(0, fact.grace_ms) * _MS_NS
            case FactKind.EXITED if self.exited_ns is None:
                self.exited_ns = at_ns
            case _:
                pass

    def end_ns(self) -> int:
        """Return the end of a period without a `freed` fact, from the `exited` fact or else the last fact."""
        return self.last_ns if self.exited_ns is None else self.exited_ns

    def parts(self, end_ns: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield each segment's index, start, end, and the origin for counting milliseconds."""
        used_ns = end_ns if self.used_ns is None else min(self.used_ns, end_ns)
        if self.began_ns < used_ns:
            starting_ns = used_ns if self.starting_ns is None else _within(self.began_ns, self.starting_ns, used_ns)
            yield _ENVIRONMENT, self.began_ns, starting_ns, self.began_ns
            yield _START, starting_ns, used_ns, self.began_ns
        if used_ns >= end_ns:
            return
        if self.was_idle:
            yield _IDLE, used_ns, end_ns, used_ns
            return
        exited_ns = end_ns if self.exited_ns is None else _within(used_ns, self.exited_ns, end_ns)
        stopping_ns = exited_ns if self.stopping_ns is None else _within(used_ns, self.stopping_ns, exited_ns)
        yield _RUN, used_ns, stopping_ns, used_ns
        yield _STOP, stopping_ns, exited_ns, used_ns
        yield _GATE, exited_ns, end_ns, used_ns


class DayUse:
    """An attempt's device usage on one day, in device-milliseconds by segment."""

    __slots__ = ("billed_ms", "core_ms", "end_ns", "gpus", "memory_mib_ms", "segments", "start_ns")

    def __init__(self, start_ns: int, end_ns: int) -> None:
        # `start_ns` is the start of the device usage in nanoseconds since 1970. `end_ns` is the end of the device
        # usage.
        self.start_ns, self.end_ns = start_ns, end_ns
        # `gpus` is the highest number of devices in use at the same time. `billed_ms` counts the billed
        # device-milliseconds. `core_ms` counts the billed core-milliseconds. `memory_mib_ms` counts the billed
        # MiB-milliseconds.
        self.gpus = self.billed_ms = self.core_ms = self.memory_mib_ms = 0
        self.segments = [0] * len(SEGMENTS)  # Device-milliseconds for each segment in `SEGMENTS`.

    def copy(self) -> DayUse:
        """Return an independent copy of the day's usage."""
        twin = DayUse(self.start_ns, self.end_ns)
        twin.gpus, twin.billed_ms = self.gpus, self.billed_ms
        twin.core_ms, twin.memory_mib_ms = self.core_ms, self.memory_mib_ms
        twin.segments = self.segments[:]
        return twin


class Meter:
    """Computes device usage from the facts of one attempt in order, without storing the facts."""

    def __init__(self) -> None:
        self._days: dict[int, DayUse] = {}
        self._open: _Stretch | None = None

    def add(self, fact: Fact) -> None:
        """Add the next fact of the attempt."""
        ended, self._open = _follow(self._open, fact)
        if ended is not None:
            _book(self._days, *ended)

    def used(self) -> dict[int, DayUse]:
        """Return the device usage up to the last report by day number, in ascending order."""
        days = self._days
        if self._open is not None:
            days = {number: day.copy() for number, day in days.items()}
            _book(days, self._open, self._open.end_ns())
        return dict(sorted(days.items()))


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """An uninterrupted period in which one attempt had devices."""

    boot_id: str  # Boot identifier of the node. Boot times are only comparable within the same boot.
    gpus: frozenset[str]
    # Boot time of the first fact about the devices. `end_ns` is the boot time of the release, or of the last report.
    start_ns: int
    end_ns: int


def lendings(facts: Iterable[Fact]) -> Iterator[Lending]:
    """Yield the uninterrupted periods in which an attempt had devices."""
    stretch: _Stretch | None = None
    for fact in facts:
        ended, stretch = _follow(stretch, fact)
        if ended is not None:
            yield _lending(*ended)
    if stretch is not None:
        yield _lending(stretch, stretch.end_ns())


def _lending(stretch: _Stretch, end_ns: int) -> Lending:
    begun_ns = stretch.began_ns
    return Lending(boot_id=stretch.boot_id, gpus=stretch.uuids, start_ns=begun_ns, end_ns=max(begun_ns, end_ns))


def _follow(stretch: _Stretch | None, fact: Fact) -> tuple[tuple[_Stretch, int] | None, _Stretch | None]:
    """Return the period that a fact ends, the end time, and the period that continues."""
    if stretch is None or fact.kind is FactKind.HELD:
        ended = None if stretch is None else (stretch, stretch.end_ns())
        return ended, _Stretch(fact) if fact.kind in _OPENING else None
    if fact.boot_id != stretch.boot_id:
        # A fact of a later boot proves that the attempt has ended, but does not contain the end time.
        return None, stretch
    if fact.kind is FactKind.FREED:
        return (stretch, fact.boottime_ns), None
    stretch.see(fact)
    return None, stretch


def _book(days: dict[int, DayUse], stretch: _Stretch, end_ns: int) -> None:
    """Add an uninterrupted period to the usage of each day that overlaps the period.

    A duration is the difference of two times, each rounded to milliseconds. The rounded durations therefore add up to
    the total duration.
    """
    began_ns, offset_ns = stretch.began_ns, stretch.wall_ns - stretch.began_ns
    end_ns = min(max(end_ns, began_ns if stretch.used_ns is None else stretch.used_ns), began_ns + STRETCH_NS_MAX)
    until_ns = end_ns if stretch.until_ns is None else min(end_ns, stretch.until_ns)
    _touch(days, stretch, stretch.wall_ns, stretch.wall_ns)
    for segment, from_ns, to_ns, origin_ns in stretch.parts(end_ns):
        while from_ns < to_ns:
            number = (from_ns + offset_ns) // DAY_NS
            next_ns = min(to_ns, (number + 1) * DAY_NS - offset_ns)
            day = _touch(days, stretch, from_ns + offset_ns, next_ns + offset_ns)
            first_ms = (from_ns - origin_ns) // _MS_NS
            day.segments[segment] += stretch.gpus * ((next_ns - origin_ns) // _MS_NS - first_ms)
            if segment >= FIRST_USED and from_ns < until_ns:
                billed_ms = (min(next_ns, until_ns) - origin_ns) // _MS_NS - first_ms
                day.billed_ms += stretch.gpus * billed_ms
                day.core_ms += stretch.cores * billed_ms
                day.memory_mib_ms += stretch.memory_mib * billed_ms
            from_ns = next_ns


def _touch(days: dict[int, DayUse], stretch: _Stretch, start_ns: int, end_ns: int) -> DayUse:
    """Return the usage of a day, with the time range extended to include a new period."""
    day = days.get(start_ns // DAY_NS)
    if day is None:
        day = days[start_ns // DAY_NS] = DayUse(start_ns, end_ns)
    day.start_ns, day.end_ns = min(day.start_ns, start_ns), max(day.end_ns, end_ns)
    day.gpus = max(day.gpus, stretch.gpus)
    return day


def _within(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)
