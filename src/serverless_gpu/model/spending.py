"""How fast somebody spends: where a period ends at this rate, and who spends far more than they are used to.

    forecast    used so far  +  what a day used on average, over the last seven and today  ×  days that are left
    alarm       a run        what it uses in an hour  >  3 × the median of earlier runs of its name, at least 5 of them
                a team       what it used in the last hour  >  3 × the median of its own hours, those in which it used
                             something, over 4 weeks; at least 24 of them

A median and not a mean: one night that went wrong must not make the next one usual. Amounts are integers of one kind,
money or GPU-milliseconds; which one, the caller knows. Values only: no clock, no database.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu import units
from serverless_gpu.model.budget import Budget, Period, Standing, Window
from serverless_gpu.model.days import DAY_NS, format_day
from serverless_gpu.model.days import HOUR_NS as HOUR_NS

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
PERIOD_WORDS = {Period.DAY: "today", Period.WEEK: "this week", Period.MONTH: "this month"}


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Where a period ends if it goes on like this.

    Attributes:
        amount: what will be used at its end, in the unit of the limit.
        per_day: the rate that this rests on.
        reached_ns: when the limit is used up at that rate, nanoseconds since 1970; None: not in this period.
        basis: what it rests on, in words.
    """

    amount: int
    per_day: int
    reached_ns: int | None
    basis: str


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody spends far more than they are used to.

    Attributes:
        rate: in an hour, now.
        usual: in an hour, the median.
        count: how many runs, or hours, that is the median of.
    """

    rate: int
    usual: int
    count: int


def forecast(standing: Standing, by_day: Mapping[int, int], now_ns: int) -> Forecast:
    """Return where a budget's period ends.

    Args:
        standing: of the budget.
        by_day: what was used on each day since 1970-01-01, in the unit of the limit; today among them.
        now_ns: nanoseconds since 1970.
    """
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
    """Return an alarm when a rate is far above the median of earlier ones, where there are enough of them.

    Args:
        rate: now.
        earlier: of the past; those that are 0 say nothing.
        least: how many it takes.
    """
    past = [one for one in earlier if one > 0]
    if len(past) < max(1, least):
        return None
    usual = statistics.median_low(past)
    return Alarm(rate=rate, usual=usual, count=len(past)) if rate > FACTOR * usual else None


def per_hour(amount: int, ms: int) -> int:
    """Return what somebody uses in an hour who used an amount in some milliseconds."""
    return amount * units.MS_PER_HOUR // max(1, ms)


def spread(amount: int, start_ns: int, end_ns: int) -> dict[int, int]:
    """Return an amount by the hours since 1970 in which it was used, evenly from start to end; the sum is the amount.

    Args:
        amount: of any sign.
        start_ns: nanoseconds since 1970.
        end_ns: likewise; at most a day later.
    """
    first, last = start_ns // HOUR_NS, max(start_ns, end_ns - 1) // HOUR_NS
    length = max(1, end_ns - start_ns)
    found: dict[int, int] = {}
    given = 0
    for hour in range(first, last + 1):
        until = length if hour == last else (hour + 1) * HOUR_NS - start_ns
        upto = amount * until // length
        found[hour], given = upto - given, upto
    return found


# --- words ------------------------------------------------------------------------------------------------------------


def amount_words(budget: Budget, amount: int, currency: str) -> str:
    """Return an amount of a budget for people: ``81.20 USD``, ``12.3 GPU-hours``."""
    if budget.limit_micros is not None:
        return units.format_micros(amount, currency)
    return units.format_gpu_ms(amount)


def gpu_words(gpu_ms: int) -> str:
    """Return GPU time for people."""
    return units.format_gpu_ms(gpu_ms)


def used_words(standing: Standing, currency: str) -> str:
    """Return how much of a limit is used, and when that is: ``81.20 of 100.00 USD this month``."""
    budget = standing.budget
    limit = amount_words(budget, budget.limit, currency)
    amount = amount_words(budget, budget.counts(standing.used), currency)
    unit = f" {limit.rpartition(' ')[2]}"
    return f"{amount.removesuffix(unit)} of {limit} {PERIOD_WORDS[budget.period]}"


def left(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return what of a budget is neither used nor held: ``llm: 76.08 of 100.00 USD left this month``.

    Args:
        name: of the budget.
        standing: how it stands.
        currency: of the server.
        is_open: whether amounts may be said.
    """
    budget, when = standing.budget, PERIOD_WORDS[standing.budget.period]
    if not is_open:
        return f"{name}: {'used up' if standing.is_used_up else 'not used up'} {when}"
    limit = amount_words(budget, budget.limit, currency)
    there = amount_words(budget, max(0, standing.left), currency).removesuffix(f" {limit.rpartition(' ')[2]}")
    return f"{name}: {there} of {limit} left {when}"


def refused(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return why a run cannot start in this period.

    Args:
        name: of the budget.
        standing: how it stands.
        currency: of the server.
        is_open: whether amounts may be said.
    """
    if standing.is_spent:
        return _is_used_up(name, standing, currency, is_open=is_open)
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    if standing.is_closed:
        return f"budget {name!r} has stopped runs {when}: what is left did not pay for another minute of them{amounts}"
    return f"budget {name!r} has less left {when} than the run's first minute costs{amounts}"


def stopped(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return why a run is stopped; as `refused`."""
    if standing.is_spent:
        return _is_used_up(name, standing, currency, is_open=is_open)
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    return f"what is left of budget {name!r} {when} does not pay for its next minute{amounts}"


def warning(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return how much of a budget is used, and what follows; as `refused`."""
    then = "its runs are stopped, with their grace for a checkpoint" if standing.budget.hard else "nothing new starts"
    if standing.is_spent:
        return f"{_is_used_up(name, standing, currency, is_open=is_open)}; {then}"
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    if standing.is_used_up or standing.stop:
        return f"what is left of budget {name!r} {when} does not pay for the next minute of its runs{amounts}; {then}"
    return f"budget {name!r} is at {int(standing.percent)} % {when}{amounts}; at 100 % {then}"


def no_room(name: str, standing: Standing) -> str:
    """Return why a run that a budget has no room for waits; the same for as long as it waits for the same."""
    when = _when(standing)
    if standing.is_spent:
        return f"budget {name!r} is used up {when}; {anew(standing.window)}"
    if standing.is_closed:
        return f"budget {name!r} has stopped runs {when}, and lets nobody in; {anew(standing.window)}"
    return (
        f"budget {name!r} has no room for it: what is left {when} is less than its first minute,"
        f" or held for runs that go on; {anew(standing.window)}"
    )


def _is_used_up(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    said = f": {used_words(standing, currency)}" if is_open else f" {_when(standing)}"
    return f"budget {name!r} is used up{said}"


def _when(standing: Standing) -> str:
    return PERIOD_WORDS[standing.budget.period]


def _amounts(standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return how much is used, in brackets: for those who may know it."""
    return f" ({used_words(standing, currency).removesuffix(_when(standing))}used)" if is_open else ""


def anew(window: Window) -> str:
    """Return when the next period begins, in words."""
    return f"the next period begins on {format_day(window.end_ns // DAY_NS)} (UTC)"
