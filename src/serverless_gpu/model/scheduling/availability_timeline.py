"""Device availability over time: free devices of one type on one node, running runs, and bookings.

    free
      8 ┤              ┌──────────            releases: runs release their devices, at a likely or a latest time
      5 ┤      ┌───────┘                      bookings: a blocked gang starts as soon as it has enough devices
      2 ┼──────┘                              backfill: a run fits now if it takes no devices from a booking,
        now   14:20  15:00                    because it ends before, or because enough devices remain

Each node has three availability profiles: by likely ends of runs, by latest ends of runs, and by guessed ends. The
scheduler enters a gang's reservation into the latest-end profile only if all runs have time limits. A run that starts
before the gang must then end before the gang's start in the likely-end and latest-end profiles. The guessed-end profile
serves gangs that must start next while the end times of other runs are unknown. A gang must start next after waiting
beyond the guard time, or if its team has used less than its fair share. A run that starts before a gang with a guessed
reservation must have a guessed end before the gang's start.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable

from serverless_gpu.model.scheduling.duration_estimates import Medians, over_after_s
from serverless_gpu.model.scheduling.values import BEST_EFFORT, DeviceShare, RunningRun


class DeviceTimeline:
    """The number of free devices of one type on one node over time.

    `now` is the current time. `free` is the number of currently free devices. `releases` lists the known times at which
    runs release devices.
    """

    def __init__(self, now: int, free: int, releases: Iterable[tuple[float, int]]) -> None:
        self._now, self._free = now, free
        self._releases = sorted(releases)
        self._bookings: list[tuple[float, float, int, str]] = []
        self._earliest: dict[tuple[int, float, float], float] = {}

    def free(self, but: str = "") -> int:
        """Return the number of free unbooked devices, negative if bookings exceed the free devices.

        The function ignores the bookings of run `but`.
        """
        return self._free - sum(
            count for start, _, count, whose in self._bookings if start <= self._now and whose != but
        )

    def fits(self, count: int, end: float) -> bool:
        """Return True if a run can use devices from now until `end` without using booked devices."""
        if count > self.free():
            return False
        starts = (start for start, *_ in self._bookings if self._now < start < end)
        return all(self._at(start) >= count for start in starts)

    def most(self, end: float, but: str) -> int:
        """Return the number of devices that a run can use until `end` without using booked devices."""
        starts = (start for start, _, _, whose in self._bookings if self._now < start < end and whose != but)
        return min([self.free(but), *(self._at(start, but) for start in starts)])

    def until(self, count: int) -> float:
        """Return the start of the earliest booking that would lack devices while a run uses `count` devices."""
        if count > self.free():
            return self._now
        starts = sorted(start for start, *_ in self._bookings if start > self._now)
        return next((start for start in starts if self._at(start) < count), math.inf)

    def take(self, count: int, end: float) -> None:
        """Record that a run uses devices from now until `end`, which is infinite if unknown."""
        self._free -= count
        self._earliest.clear()
        if not math.isinf(end):
            insort(self._releases, (end, count))

    def like(self, other: DeviceTimeline) -> DeviceTimeline:
        """Replace the bookings with a copy of another timeline's bookings, and return this timeline."""
        self._bookings = list(other._bookings)
        self._earliest.clear()
        return self

    def book(self, run_id: str, count: int, span: tuple[float, float]) -> None:
        """Book devices for a run in a time span."""
        self._bookings.append((*span, count, run_id))
        self._earliest.clear()

    def earliest(self, count: int, length: float, after: float = 0.0) -> float:
        """Return the earliest time at which `count` devices are free for `length`, infinite if unknown."""
        asked = (count, length, after)
        if asked not in self._earliest:
            self._earliest[asked] = self._found(*asked)
        return self._earliest[asked]

    def _found(self, count: int, length: float, after: float) -> float:
        steps = [(at, number) for at, number in self._releases if at > self._now]
        free = self._free + sum(number for at, number in self._releases if at <= self._now)
        for start, end, number, _ in self._bookings:
            steps.append((max(start, self._now), -number))
            if not math.isinf(end):
                steps.append((end, number))
        steps.sort()
        begun: float | None = None
        at: float = self._now
        for index in range(len(steps) + 1):
            until = steps[index][0] if index < len(steps) else math.inf
            if until > at:  # Apply all changes at one time before checking the free devices.
                if free < count:
                    begun = None
                elif begun is None:
                    begun = max(at, after)
                if begun is not None and until >= begun + length:
                    return begun
            if index < len(steps):
                at, change = steps[index]
                free += change
        return math.inf if begun is None else begun

    def _at(self, time: float, but: str = "") -> int:
        free = self._free + sum(count for at, count in self._releases if at <= time)
        return free - sum(count for start, end, count, whose in self._bookings if start <= time < end and whose != but)


class PromiseBook:
    """Reservations of devices of one type on one node."""

    def __init__(self, likely: DeviceTimeline, bound: DeviceTimeline) -> None:
        # `bound` is the latest-end profile. `likely` is the likely-end profile.
        self.likely, self.bound = likely, bound
        # Guessed-end profile, or None if no reservation on the node needs a guess.
        self.guess: DeviceTimeline | None = None
        # Runs with reservations, in order of reservation, each with its number of devices.
        self.names: list[tuple[str, int]] = []

    def fits(self, count: int, ends: Ends) -> bool:
        """Return True if a run can use devices now without delaying a run with a reservation."""
        likely, bound, guess = ends
        if not (self.likely.fits(count, likely) and self.bound.fits(count, bound)):
            return False
        return self.guess is None or self.guess.fits(count, guess)

    def most(self, ends: Ends, but: str) -> int:
        """Return the number of devices that a run can use now without delaying a run with a reservation.

        The function ignores bookings of the run `but`.
        """
        return min(profile.most(end, but) for profile, end in zip(self._profiles(), ends, strict=False))

    def take(self, count: int, ends: Ends) -> None:
        """Record that a run starts on devices now."""
        for profile, end in zip(self._profiles(), ends, strict=False):
            profile.take(count, end)

    def keep(self, run_id: str, count: int, now: int) -> None:
        """Hold devices for a run as other runs release the devices."""
        for profile in self._profiles():
            profile.book(run_id, count, (now, math.inf))
        self.names.append((run_id, count))

    def promise(self, run_id: str, count: int, likely: tuple[float, float], bound: tuple[float, float] | None) -> None:
        """Reserve devices for a run. If the latest start time is unknown, `bound` is None."""
        self.likely.book(run_id, count, likely)
        if self.guess is not None:
            self.guess.book(run_id, count, likely)
        if bound is not None:
            self.bound.book(run_id, count, bound)
        self.names.append((run_id, count))

    def suppose(self, run_id: str, count: int, guess: tuple[float, float]) -> None:
        """Reserve devices for a run in the guessed-end profile, which the caller must set first."""
        if self.guess is not None:
            self.guess.book(run_id, count, guess)
        self.names.append((run_id, count))

    def _profiles(self) -> tuple[DeviceTimeline, ...]:
        return (self.likely, self.bound) if self.guess is None else (self.likely, self.bound, self.guess)


Ends = tuple[float, float, float]
"""The likely, latest and guessed end of a run, each infinite if unknown."""


_S = 1_000_000_000
OVERDUE_NS = 60 * _S
"""Assumed nanoseconds until an overdue run, which the server is already stopping, releases its devices."""


class HeldDevices:
    """The devices of one type that a run holds on a node."""

    __slots__ = ("_guess_ns", "bound_ns", "count", "likely_ns", "running", "size")

    def __init__(self, running: RunningRun, count: int) -> None:
        self.running, self.count = running, count
        self.size = sum(share.count for share in running.shares)  # Number of the run's devices on all nodes.
        # Likely and latest time at which the run releases the devices, infinite if unknown.
        self.likely_ns, self.bound_ns = ends(running)
        self._guess_ns = 0.0

    def guess(self, now_ns: int, medians: Medians) -> float:
        """Return the likely release time of the devices, or a guess from other runs of equal size."""
        if not math.isinf(self.likely_ns):
            return self.until(now_ns)[0]
        if self._guess_ns <= now_ns:
            since_ns = self.running.since_ns
            after_s = medians.over_after_s(self.size, (now_ns - since_ns) / _S)
            self._guess_ns = max(since_ns + after_s * _S, now_ns + 1)
        return self._guess_ns

    def until(self, now_ns: int) -> tuple[float, float]:
        """Return the likely and the latest time at which the run releases its devices."""
        bound = self.bound_ns if self.bound_ns > now_ns else now_ns + OVERDUE_NS
        if self.likely_ns > now_ns:
            return min(self.likely_ns, bound), bound
        since_ns, wanted = self.running.since_ns, self.running.wanted
        after_s, _ = over_after_s((now_ns - since_ns) / _S, expected_s=wanted.expected_s, limit_s=wanted.limit_s)
        likely = math.inf if after_s is None else since_ns + after_s * _S
        return (min(likely, bound) if likely > now_ns else bound), bound


def ends(running: RunningRun) -> tuple[float, float]:
    """Return the likely and the latest time at which a run releases its devices, infinite if unknown."""
    wanted = running.wanted
    bound = math.inf if wanted.limit_s is None else running.since_ns + wanted.limit_s * _S
    likely = math.inf if wanted.expected_s is None else running.since_ns + wanted.expected_s * _S
    return min(likely, bound), bound


class Leavers:
    """Counts the devices of preemptible runs and of stopping runs."""

    def __init__(self) -> None:
        # Device counts by node and type: one count per priority class, then the count for stopping runs.
        self.counts: dict[tuple[str, str], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self.counts)

    def count(self, running: RunningRun, share: DeviceShare, number: int) -> None:
        """Add `number` devices of a run to the counts, or subtract devices if `number` is negative."""
        if not (running.wanted.preemptible or running.is_leaving):
            return
        key = (share.node_id, share.gpu_type)
        counts = self.counts.setdefault(key, [0] * (BEST_EFFORT + 2))
        counts[-1 if running.is_leaving else min(running.wanted.priority, BEST_EFFORT)] += number
        if not any(counts):
            del self.counts[key]

    def leaving(self, node_id: str, gpu_type: str) -> int:
        """Return the number of a node's devices that stopping runs use."""
        counts = self.counts.get((node_id, gpu_type))
        return 0 if counts is None else counts[-1]

    def most(self, node_id: str, gpu_type: str, above: int) -> int:
        """Return the number of a node's devices that preemption of classes below `above` can free."""
        counts = self.counts.get((node_id, gpu_type))
        return 0 if counts is None else sum(counts[above + 1 :])
