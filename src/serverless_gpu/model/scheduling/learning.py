"""How long a run is likely to have its devices, from how long its like had them: same owner, same name.

    last 20 that ended by themselves, newest first ─▶ fewer than 3: nothing is known
                                                   └─▶ the duration that four of five of them stayed within

A run that is let through while devices are kept for others must be over in time, so the value is an upper one; it is
the 80th percentile and not the longest, because one that hung once is not to spoil the next twenty. Who is past what
was expected is expected for twice as long, and so on: most that took longer than their like take much longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

SAMPLES_MIN = 3
SAMPLES_MAX = 20
QUANTILE = 0.8


def expected_s(durations_s: Iterable[float]) -> float | None:
    """Return how long a run is likely to have its devices, or None while too little is known.

    Args:
        durations_s: how long earlier ones of the same owner and name had theirs, newest first. Only those count that
            succeeded or ran into their limit: one that failed or was stopped says little about how long it takes.
    """
    samples = sorted(islice(durations_s, SAMPLES_MAX))
    if len(samples) < SAMPLES_MIN:
        return None
    return samples[math.ceil(QUANTILE * len(samples)) - 1]


def over_after_s(elapsed_s: float, *, expected_s: float | None, limit_s: float | None) -> tuple[float | None, bool]:
    """Return after how many seconds from its start a run gives its devices back, and whether that is the latest.

    Args:
        elapsed_s: how long it has had them.
        expected_s: how long that was likely to be.
        limit_s: how long it may be at most.

    Returns:
        Seconds, None where nobody can say. What is learned counts where it is less than what is declared.
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
