"""Traces for those who have none: jobs as they came to large shared clusters, made up from a seed.

Nothing of a real trace is in here but a few of its figures, those that decide how a queue behaves:

    sizes       83 % of jobs have one GPU, and 13 % of the GPU time; 10 % have a whole node, and 49 % of the GPU time
    durations   log-normal within a size; 0.1 to 0.3 % of jobs take longer than a week, and 8 to 28 % of the GPU time
    arrivals    in bursts: a user's jobs come several at a time, days have nights, and the fullest hour has 11 times the
                jobs of the mean hour; gaps between jobs vary 3 to 13 times as much as their mean
    people      few users of few teams have most of the jobs

The same seed and the same wishes give the same trace.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from serverless_gpu.errors import InvalidValue
from serverless_gpu.replay.traces import Job, Trace, trace_of

JOBS_MAX = 1_000_000
PEAK = 11.0
"""The fullest hour has so many times the jobs of the mean hour."""


class _Size(NamedTuple):
    """Jobs of so many GPUs: their part of all jobs, and of all GPU time."""

    gpus: int
    of_jobs: float
    of_time: float


_SIZES = (
    _Size(1, 0.830, 0.13),
    _Size(2, 0.035, 0.03),
    _Size(4, 0.025, 0.06),
    _Size(8, 0.100, 0.49),
    _Size(16, 0.006, 0.10),
    _Size(32, 0.003, 0.11),
    _Size(64, 0.001, 0.08),
)
_SINGLE_MEAN_S = 3 * 3600.0
_SPREAD = 1.6
_SHORTEST_S, _LONGEST_S = 30.0, 45 * 86_400.0
_HOUR_S = 3600.0
_ENOUGH = 100  # jobs of a size, from which on their mean is made exact
_BATCH_MEAN = 4.0
_TEAMS = ("search", "vision", "speech", "ads", "robotics")
_USERS = 40
_NAMES_EACH = 4


def generate(jobs: int, *, gpus: int, load: float = 0.9, seed: int = 0) -> Trace:
    """Return a trace that was made up.

    Args:
        jobs: how many.
        gpus: how many the cluster has that it is for; no job has more.
        load: GPU time of all jobs over what the cluster has until the last of them comes.
        seed: another one gives another trace.

    Raises:
        InvalidValue: a number is out of range.
    """
    if not 1 <= jobs <= JOBS_MAX:
        raise InvalidValue(f"{jobs} jobs cannot be made up", hint=f"1 to {JOBS_MAX}")
    if not 0.01 <= load <= 10:
        raise InvalidValue(f"a load of {load:g} cannot be made up", hint="0.01 to 10; 0.9 is a full cluster")
    chance = random.Random(seed)
    sizes = [size for size in _SIZES if size.gpus <= gpus]
    drawn = chance.choices(sizes, weights=[size.of_jobs for size in sizes], k=jobs)
    durations = _durations(drawn, chance)
    work = math.fsum(size.gpus * duration for size, duration in zip(drawn, durations, strict=True))
    arrivals = _arrivals(jobs, work / (gpus * load), chance)
    people = list(_people(arrivals, chance))
    made = (
        Job(
            job_id=str(place),
            submit_s=at_s,
            duration_s=duration,
            gpus=size.gpus,
            team=_TEAMS[user % len(_TEAMS)],
            user=f"user{user:02}",
            name=f"job{name}",
        )
        for place, (size, duration, (at_s, _), (user, name)) in enumerate(
            zip(drawn, durations, arrivals, people, strict=True)
        )
    )
    return trace_of(made, f"made up: {jobs} jobs, seed {seed}")


def _durations(drawn: list[_Size], chance: random.Random) -> list[float]:
    """Return how long each takes: those of a size together what their part of the GPU time is."""
    single = _SIZES[0]
    raw = [chance.lognormvariate(-(_SPREAD**2) / 2, _SPREAD) for _ in drawn]
    sums: dict[_Size, float] = {}
    for size, duration in zip(drawn, raw, strict=True):
        sums[size] = sums.get(size, 0.0) + duration
    counts = Counter(drawn)
    scales = {
        size: _SINGLE_MEAN_S
        * (size.of_time / (size.of_jobs * size.gpus))
        / (single.of_time / single.of_jobs)
        * (counts[size] / sums[size] if counts[size] >= _ENOUGH else 1.0)
        for size in counts
    }
    return [
        min(_LONGEST_S, max(_SHORTEST_S, scales[size] * duration)) for size, duration in zip(drawn, raw, strict=True)
    ]


# --- when -------------------------------------------------------------------------------------------------------------


def _arrivals(jobs: int, span_s: float, chance: random.Random) -> list[tuple[float, int]]:
    """Return when jobs come, and with which burst, in order of time."""
    hours = max(1, math.ceil(span_s / _HOUR_S))
    bounds = list(accumulate(_hour_weights(hours, chance)))
    arrivals: list[tuple[float, int]] = []
    burst = 0
    while len(arrivals) < jobs:
        hour = chance.choices(range(hours), cum_weights=bounds)[0]
        at_s = min(span_s, (hour + chance.random()) * _HOUR_S)
        for _ in range(min(jobs - len(arrivals), 1 + int(chance.expovariate(1 / (_BATCH_MEAN - 1))))):
            arrivals.append((round(at_s, 3), burst))
            at_s += chance.expovariate(1 / 2.0)
        burst += 1
    return sorted(arrivals)


def _hour_weights(hours: int, chance: random.Random) -> list[float]:
    """Return how likely each hour is: days, weekends, and chance; the likeliest is `PEAK` times the mean."""
    raw = [
        (1.0 + 0.6 * math.sin(2 * math.pi * (hour % 24 - 9) / 24))
        * (0.6 if hour // 24 % 7 >= 5 else 1.0)
        * chance.lognormvariate(0, 0.7)
        for hour in range(hours)
    ]
    peak = min(PEAK, max(1.0, hours / 4))
    low, high = 0.0, 8.0
    for _ in range(40):
        power = (low + high) / 2
        weights = [weight**power for weight in raw]
        low, high = (power, high) if max(weights) * hours < peak * math.fsum(weights) else (low, power)
    return weights


def _people(arrivals: list[tuple[float, int]], chance: random.Random) -> list[tuple[int, int]]:
    """Return whose job each is, and which of theirs: those of a burst are of one."""
    weights = [1 / (user + 1) for user in range(_USERS)]
    bursts: dict[int, tuple[int, int]] = {}
    for _, burst in arrivals:
        if burst not in bursts:
            user = chance.choices(range(_USERS), weights=weights)[0]
            bursts[burst] = (user, chance.randrange(_NAMES_EACH))
    return [bursts[burst] for _, burst in arrivals]
