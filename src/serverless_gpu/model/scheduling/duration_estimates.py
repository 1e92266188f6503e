"""Duration estimates, learned from earlier runs of the same owner and name.

    last 20 that ended by themselves, newest first ─▶ fewer than 3: nothing is known
                                                   └─▶ the duration that four of five of them stayed within

A run that is let through while devices are kept for others must be over in time, so the value is an upper one; it is
the 80th percentile and not the longest, because one that hung once is not to spoil the next twenty. Who is past what
was expected is expected for twice as long, and so on: most that took longer than their like take much longer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from itertools import islice

from serverless_gpu.model.lifecycle.attempt import Limits

START_S = Limits().start_ns / 1e9
"""From the placement to the first byte of user code; longer only while an environment is still being made ready."""
LEAVING_S = 60.0
"""Beyond its grace: until its processes are gone, and its devices proven free."""
SAMPLES_MIN = 3
SAMPLES_MAX = 20
QUANTILE = 0.8
SEEN_MAX = 200
"""So many that ended are remembered of each size."""
YOUNG_S = 3600.0
"""Where nothing was seen, a run is thought to run for as long again as it has, and for this at least."""
CAP_TOLD_MAX_S = 86_400.0
"""A limit that the owner did not declare says when a run ends only where it is no longer than that."""


def says_no_end(*, expected_s: float | None, limit_s: float | None, capped: bool) -> bool:
    """Return whether a run's limit is only a cap of days, as every run has, and nothing was learned of its like."""
    return expected_s is None and capped and limit_s is not None and limit_s > CAP_TOLD_MAX_S


def limit_s(timeout_s: float | None, grace_s: float, *, start_s: float = START_S) -> float | None:
    """Return for how long a run has its devices at most, from when it gets them, or None without a time limit."""
    return None if timeout_s is None else start_s + timeout_s + grace_s + LEAVING_S


def expected_s(durations_s: Iterable[float]) -> float | None:
    """Return how long a run is likely to have its devices, or None while too little is known.

    `durations_s` holds earlier successful runs of the owner and name, newest first.
    """
    samples = sorted(islice(durations_s, SAMPLES_MAX))
    if len(samples) < SAMPLES_MIN:
        return None
    return samples[math.ceil(QUANTILE * len(samples)) - 1]


def longest_s(durations_s: Iterable[float]) -> float | None:
    """Return the longest of the last durations, or None while too little is known; the argument is `expected_s`'s."""
    samples = list(islice(durations_s, SAMPLES_MAX))
    return max(samples) if len(samples) >= SAMPLES_MIN else None


def over_after_s(elapsed_s: float, *, expected_s: float | None, limit_s: float | None) -> tuple[float | None, bool]:
    """Return after how many seconds from its start a run gives its devices back, and whether that is the latest.

    Returns None where the end is unknown. A learned time counts where it is less than the declared one.
    """
    if expected_s is None or expected_s <= 0:
        return limit_s, limit_s is not None
    times = max(0, math.ceil(math.log2(max(elapsed_s, expected_s) / expected_s)))
    likely_s = expected_s * 2.0**times
    if likely_s <= elapsed_s:
        likely_s *= 2
    if limit_s is not None and limit_s <= likely_s:
        return limit_s, True
    return likely_s, False


class Medians:
    """How long runs had their devices, by how many they had: the guess for a run without any history.

    Good enough for an order of what gets free when; no time that is shown rests on it.
    """

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self._sorted: dict[int, list[float]] = {}

    def note(self, count: int, seconds: float) -> None:
        """Take note of a run that has ended."""
        last = self._last.setdefault(count, deque())
        ordered = self._sorted.setdefault(count, [])
        if len(last) >= SEEN_MAX:
            del ordered[bisect_left(ordered, last.popleft())]
        last.append(seconds)
        insort(ordered, seconds)

    def length_s(self, count: int) -> float | None:
        """Return how long a run of this size is thought to take, or None while too few were seen."""
        ordered = self._sorted.get(count, ())
        return ordered[(len(ordered) - 1) // 2] if len(ordered) >= SAMPLES_MIN else None

    def over_after_s(self, count: int, elapsed_s: float) -> float:
        """Return after how many seconds from its start a run that has taken so long already is thought to be over."""
        length_s = self.length_s(count)
        if length_s is None:
            return 2 * max(elapsed_s, YOUNG_S)
        after_s, _ = over_after_s(elapsed_s, expected_s=max(length_s, 1.0), limit_s=None)
        return elapsed_s if after_s is None else after_s
