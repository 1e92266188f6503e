"""Duration estimates, learned from earlier runs of the same owner and name.

    last 20 successful runs, newest first ─▶ fewer than 3: unknown
                                          └─▶ the duration that four of five of them did not exceed

Estimates are conservative, because a run on devices with a later reservation must end in time. The module uses the 80th
percentile instead of the maximum, because one hang must not distort the next 20 estimates. Each time a run exceeds its
estimate, the module doubles the estimate, because most late runs run much longer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from itertools import islice

from serverless_gpu.model.lifecycle.attempt import Limits

START_S = Limits().start_ns / 1e9
"""Seconds from the placement to the start of user code if the node already has the environment."""
LEAVING_S = 60.0
"""Seconds after the grace period until all processes have ended and the node has verified the devices free."""
SAMPLES_MIN = 3
SAMPLES_MAX = 20
QUANTILE = 0.8
SEEN_MAX = 200
"""Maximum number of ended runs that the planner stores per run size."""
YOUNG_S = 3600.0
"""Minimum elapsed seconds in a guess without earlier runs, which is twice the elapsed time."""
CAP_TOLD_MAX_S = 86_400.0
"""Longest default time limit, in seconds, from which the planner predicts the end of a run."""


def says_no_end(*, expected_s: float | None, limit_s: float | None, capped: bool) -> bool:
    """Return True if a run has only a default limit of days, and no earlier runs with its name."""
    return expected_s is None and capped and limit_s is not None and limit_s > CAP_TOLD_MAX_S


def limit_s(timeout_s: float | None, grace_s: float, *, start_s: float = START_S) -> float | None:
    """Return the maximum seconds for which a run has devices, or None without a time limit."""
    return None if timeout_s is None else start_s + timeout_s + grace_s + LEAVING_S


def expected_s(durations_s: Iterable[float]) -> float | None:
    """Return the expected seconds for which a run has devices, or None after too few earlier runs.

    `durations_s` contains the durations of earlier successful runs of the owner and name, newest first.
    """
    samples = sorted(islice(durations_s, SAMPLES_MAX))
    if len(samples) < SAMPLES_MIN:
        return None
    return samples[math.ceil(QUANTILE * len(samples)) - 1]


def longest_s(durations_s: Iterable[float]) -> float | None:
    """Return the longest recent duration of earlier runs, or None after too few earlier runs.

    `durations_s` contains the same durations as in `expected_s`.
    """
    samples = list(islice(durations_s, SAMPLES_MAX))
    return max(samples) if len(samples) >= SAMPLES_MIN else None


def over_after_s(elapsed_s: float, *, expected_s: float | None, limit_s: float | None) -> tuple[float | None, bool]:
    """Return the seconds from start to device release, and True if they follow from a declared limit.

    Returns None if the run's end is unknown. A learned duration replaces a longer declared limit.
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
    """Median device time of runs by number of devices, as a guess for runs without earlier runs.

    The guess is accurate enough to order device releases. The server never shows a time that depends on a guess.
    """

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self._sorted: dict[int, list[float]] = {}

    def note(self, count: int, seconds: float) -> None:
        """Record the duration of an ended run."""
        last = self._last.setdefault(count, deque())
        ordered = self._sorted.setdefault(count, [])
        if len(last) >= SEEN_MAX:
            del ordered[bisect_left(ordered, last.popleft())]
        last.append(seconds)
        insort(ordered, seconds)

    def length_s(self, count: int) -> float | None:
        """Return the guessed duration of a run by its number of devices, or None after too few runs."""
        ordered = self._sorted.get(count, ())
        return ordered[(len(ordered) - 1) // 2] if len(ordered) >= SAMPLES_MIN else None

    def over_after_s(self, count: int, elapsed_s: float) -> float:
        """Return the guessed total seconds of a run that has already run for `elapsed_s`."""
        length_s = self.length_s(count)
        if length_s is None:
            return 2 * max(elapsed_s, YOUNG_S)
        after_s, _ = over_after_s(elapsed_s, expected_s=max(length_s, 1.0), limit_s=None)
        return elapsed_s if after_s is None else after_s
