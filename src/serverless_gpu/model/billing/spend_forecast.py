"""Spend forecasts: the end of a period at the present rate, and alarms about unusual spending.

    forecast    used so far  +  what a day used on average, over the last seven and today  ×  days that are left
    alarm       a run        what it uses in an hour  >  3 × the median of earlier runs of its name, at least 5 of them
                a team       what it used in the last hour  >  3 × the median of its own hours, those in which it used
                             something, over 4 weeks; at least 24 of them

A median and not a mean: one night that went wrong must not make the next one usual. Amounts are integers of one kind,
money or device-milliseconds; which one, the caller knows. Values only: no clock, no database.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu.model.billing.budget import Standing
from serverless_gpu.model.calendars import DAY_NS, HOUR_NS

FORECAST_DAYS = 7
"""How many days before today a forecast looks at."""
FACTOR = 3
"""How many times the usual is an alarm."""
RUNS_MIN = 5
RUNS_MAX = 50
"""How many earlier runs of a name say what is usual, at least and at most."""
HOURS_MIN = 24
HOURS = 28 * 24
"""How many hours say what is usual for a team, at least, and how far back they go."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The expected use at the end of a period."""

    amount: int  # what will be used at its end, in the unit of the limit
    per_day: int  # the rate that this rests on
    reached_ns: int | None  # when the limit is used up at that rate, nanoseconds since 1970; None: not in this period
    basis: str  # what it rests on, in words


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A spend rate far above the usual one."""

    rate: int  # in an hour, now
    usual: int  # in an hour, the median
    count: int  # how many runs, or hours, that is the median of


def forecast(standing: Standing, by_day: Mapping[int, int], now_ns: int) -> Forecast:
    """Return where a budget's period ends."""
    budget, within = standing.budget, standing.window
    today = now_ns // DAY_NS
    there = [day for day, amount in by_day.items() if today - FORECAST_DAYS <= day <= today and amount]
    first = min(there, default=today)
    looked_ns = max(1, now_ns - first * DAY_NS)
    amount = sum(by_day[day] for day in there)
    spent = budget.counts(standing.used)
    left_ns = max(0, within.end_ns - now_ns)
    at_end = spent + amount * left_ns // looked_ns
    reached_ns = None
    if spent >= budget.limit:
        reached_ns = now_ns
    elif amount and at_end >= budget.limit:
        reached_ns = now_ns + (budget.limit - spent) * looked_ns // amount
    days = today - first
    basis = "used so far + use per day since " + (f"{days} days ago" if days else "midnight") + " × days left"
    return Forecast(amount=at_end, per_day=amount * DAY_NS // looked_ns, reached_ns=reached_ns, basis=basis)


def unusual(rate: int, earlier: Sequence[int], *, least: int) -> Alarm | None:
    """Return an alarm when a rate is far above the median of earlier ones, where there are enough of them."""
    past = [one for one in earlier if one > 0]
    if len(past) < max(1, least):
        return None
    usual = statistics.median_low(past)
    return Alarm(rate=rate, usual=usual, count=len(past)) if rate > FACTOR * usual else None


def spread(amount: int, start_ns: int, end_ns: int) -> dict[int, int]:
    """Divide an amount evenly over the hours since 1970 between start and end, at most a day apart."""
    first, last = start_ns // HOUR_NS, max(start_ns, end_ns - 1) // HOUR_NS
    length = max(1, end_ns - start_ns)
    found: dict[int, int] = {}
    given = 0
    for hour in range(first, last + 1):
        until = length if hour == last else (hour + 1) * HOUR_NS - start_ns
        upto = amount * until // length
        found[hour], given = upto - given, upto
    return found
