"""Availability over time: the devices of one type on one node from now on, their holders, and their bookings.

    free
      8 ┤              ┌──────────            releases: those who have devices give them back, likely or at the latest
      5 ┤      ┌───────┘                      bookings: a blocked gang starts as soon as there is enough for it
      2 ┼──────┘                              backfill: a run fits now if it takes nothing away from a booking,
        now   14:20  15:00                    because it is over before, or because enough is left beside it

There are three such profiles of a node: by when runs likely end, by when they end at the latest, and by a guess. A
gang's reservation is entered into the second only where everybody has said how long they run at most; what is let in
before it then has to end in time by both. The third is there only for those who are next whatever it takes (the guard,
a share that is behind) where nothing is known: what is let in before them has to be over in time by a guess.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable

from serverless_gpu.model.scheduling.duration_estimates import Medians, over_after_s
from serverless_gpu.model.scheduling.values import BEST_EFFORT, DeviceShare, RunningRun


class DeviceTimeline:
    """What is free of one type on one node, now and later.

    now: the time. free: devices that are free now. releases: when how many more become free; those that nobody can say
    are not among them.
    """

    def __init__(self, now: int, free: int, releases: Iterable[tuple[float, int]]) -> None:
        self._now, self._free = now, free
        self._releases = sorted(releases)
        self._bookings: list[tuple[float, float, int, str]] = []
        self._earliest: dict[tuple[int, float, float], float] = {}

    def free(self, but: str = "") -> int:
        """Return what is free now beside the bookings that hold from now on; less than 0 when more is waited for.

        Bookings of the run `but` do not count. Negative when more devices are awaited.
        """
        return self._free - sum(
            count for start, _, count, whose in self._bookings if start <= self._now and whose != but
        )

    def fits(self, count: int, end: float) -> bool:
        """Return whether devices can be had now and until `end` without taking any from a booking."""
        if count > self.free():
            return False
        starts = (start for start, *_ in self._bookings if self._now < start < end)
        return all(self._at(start) >= count for start in starts)

    def most(self, end: float, but: str) -> int:
        """Return how many devices can be had now and until `end` without taking any from a booking of another run."""
        starts = (start for start, _, _, whose in self._bookings if self._now < start < end and whose != but)
        return min([self.free(but), *(self._at(start, but) for start in starts)])

    def until(self, count: int) -> float:
        """Return until when devices can be had from now on: the first booking that they would be missing from."""
        if count > self.free():
            return self._now
        starts = sorted(start for start, *_ in self._bookings if start > self._now)
        return next((start for start in starts if self._at(start) < count), math.inf)

    def take(self, count: int, end: float) -> None:
        """Note that a run has devices from now until `end`, infinite where unknown."""
        self._free -= count
        self._earliest.clear()
        if not math.isinf(end):
            insort(self._releases, (end, count))

    def like(self, other: DeviceTimeline) -> DeviceTimeline:
        """Return itself, with what is promised in another one."""
        self._bookings = list(other._bookings)
        self._earliest.clear()
        return self

    def book(self, run_id: str, count: int, span: tuple[float, float]) -> None:
        """Promise devices to a run for a time."""
        self._bookings.append((*span, count, run_id))
        self._earliest.clear()

    def earliest(self, count: int, length: float, after: float = 0.0) -> float:
        """Return when so many are free for so long for the first time after a time; infinite where unknown."""
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
            if until > at:  # all that changes at one time was added up
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
    """Promised devices of one type on one node."""

    def __init__(self, likely: DeviceTimeline, bound: DeviceTimeline) -> None:
        # `bound`: by when they end at the latest.
        # `likely`: by when runs likely end.
        self.likely, self.bound = likely, bound
        # By when they end by a guess, where a run is promised something by that.
        self.guess: DeviceTimeline | None = None
        # Identifiers of the runs that are promised something, in their order, and how much.
        self.names: list[tuple[str, int]] = []

    def fits(self, count: int, ends: Ends) -> bool:
        """Return whether a run can have devices now without making anybody wait who was promised some."""
        likely, bound, guess = ends
        if not (self.likely.fits(count, likely) and self.bound.fits(count, bound)):
            return False
        return self.guess is None or self.guess.fits(count, guess)

    def most(self, ends: Ends, but: str) -> int:
        """Return how many devices a run can have now without making anybody wait who was promised some.

        Its own booking (`but`) does not count.
        """
        return min(profile.most(end, but) for profile, end in zip(self._profiles(), ends, strict=False))

    def take(self, count: int, ends: Ends) -> None:
        """Note that a run got devices now."""
        for profile, end in zip(self._profiles(), ends, strict=False):
            profile.take(count, end)

    def keep(self, run_id: str, count: int, now: int) -> None:
        """Hold devices for a run from now on, whenever they get free."""
        for profile in self._profiles():
            profile.book(run_id, count, (now, math.inf))
        self.names.append((run_id, count))

    def promise(self, run_id: str, count: int, likely: tuple[float, float], bound: tuple[float, float] | None) -> None:
        """Promise devices to a run. `bound` is None where the end is unknown."""
        self.likely.book(run_id, count, likely)
        if self.guess is not None:
            self.guess.book(run_id, count, likely)
        if bound is not None:
            self.bound.book(run_id, count, bound)
        self.names.append((run_id, count))

    def suppose(self, run_id: str, count: int, guess: tuple[float, float]) -> None:
        """Promise devices to a run by a guess: `guess` is there already."""
        if self.guess is not None:
            self.guess.book(run_id, count, guess)
        self.names.append((run_id, count))

    def _profiles(self) -> tuple[DeviceTimeline, ...]:
        return (self.likely, self.bound) if self.guess is None else (self.likely, self.bound, self.guess)


Ends = tuple[float, float, float]
"""When a run is over: likely, at the latest, by a guess; infinite where unknown."""


_S = 1_000_000_000
OVERDUE_NS = 60 * _S
"""What is over its own limit is being stopped: it counts as gone after that."""


class HeldDevices:
    """Devices of one type that a run has on a node."""

    __slots__ = ("_guess_ns", "bound_ns", "count", "likely_ns", "running", "size")

    def __init__(self, running: RunningRun, count: int) -> None:
        # `count`: how many.
        self.running, self.count = running, count
        self.size = sum(share.count for share in running.shares)  # how many it has altogether
        # `bound_ns`: when at the latest; the same.
        # `likely_ns`: when it gives them back, likely; infinite where unknown.
        self.likely_ns, self.bound_ns = ends(running)
        self._guess_ns = 0.0

    def guess(self, now_ns: int, medians: Medians) -> float:
        """Return when it likely gives them back; where unknown, by what others of its size did."""
        if not math.isinf(self.likely_ns):
            return self.until(now_ns)[0]
        if self._guess_ns <= now_ns:
            since_ns = self.running.since_ns
            after_s = medians.over_after_s(self.size, (now_ns - since_ns) / _S)
            self._guess_ns = max(since_ns + after_s * _S, now_ns + 1)
        return self._guess_ns

    def until(self, now_ns: int) -> tuple[float, float]:
        """Return likely and latest end, as it looks now: who has run for longer than was likely may run much longer."""
        bound = self.bound_ns if self.bound_ns > now_ns else now_ns + OVERDUE_NS
        if self.likely_ns > now_ns:
            return min(self.likely_ns, bound), bound
        since_ns, wanted = self.running.since_ns, self.running.wanted
        after_s, _ = over_after_s((now_ns - since_ns) / _S, expected_s=wanted.expected_s, limit_s=wanted.limit_s)
        likely = math.inf if after_s is None else since_ns + after_s * _S
        return (min(likely, bound) if likely > now_ns else bound), bound


def ends(running: RunningRun) -> tuple[float, float]:
    """Return when a run likely gives its devices back, and when at the latest; infinite where unknown."""
    wanted = running.wanted
    bound = math.inf if wanted.limit_s is None else running.since_ns + wanted.limit_s * _S
    likely = math.inf if wanted.expected_s is None else running.since_ns + wanted.expected_s * _S
    return min(likely, bound), bound


class Leavers:
    """Devices of runs that may be stopped and go on later, and of those that are leaving already."""

    def __init__(self) -> None:
        # By node and type: of each class, and at last of those that are leaving; no entry without any.
        self.counts: dict[tuple[str, str], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self.counts)

    def count(self, running: RunningRun, share: DeviceShare, number: int) -> None:
        """Take note that a run has so many devices more, or less."""
        if not (running.wanted.preemptible or running.is_leaving):
            return
        key = (share.node_id, share.gpu_type)
        counts = self.counts.setdefault(key, [0] * (BEST_EFFORT + 2))
        counts[-1 if running.is_leaving else min(running.wanted.priority, BEST_EFFORT)] += number
        if not any(counts):
            del self.counts[key]

    def leaving(self, node_id: str, gpu_type: str) -> int:
        """Return how many devices of a node runs have that are leaving already."""
        counts = self.counts.get((node_id, gpu_type))
        return 0 if counts is None else counts[-1]

    def most(self, node_id: str, gpu_type: str, above: int) -> int:
        """Return how many devices of a node could get free at most."""
        counts = self.counts.get((node_id, gpu_type))
        return 0 if counts is None else sum(counts[above + 1 :])
