"""Messages about a budget: how much is left, why a run is refused, waits, is warned or stopped.

Readers who may not see the amounts get the same sentence without them. Values only: no clock, no database.
"""

from __future__ import annotations

from serverless_gpu import units
from serverless_gpu.model.billing.budget import CLOSED, FULL, Budget, Period, Standing
from serverless_gpu.model.calendars import format_day, local_day

PERIOD_WORDS = {Period.DAY: "today", Period.WEEK: "this week", Period.MONTH: "this month"}


def amount_words(budget: Budget, amount: int, currency: str) -> str:
    """Return an amount of a budget for people: ``81.20 USD``, ``12.3 GPU-hours``."""
    if budget.limit_micros is not None:
        return units.format_micros(amount, currency)
    return units.format_gpu_ms(amount)


def used_words(standing: Standing, currency: str) -> str:
    """Return how much of a limit is used, and when that is: ``81.20 of 100.00 USD this month``."""
    budget = standing.budget
    limit = amount_words(budget, budget.limit, currency)
    amount = amount_words(budget, budget.counts(standing.used), currency)
    unit = f" {limit.rpartition(' ')[2]}"
    return f"{amount.removesuffix(unit)} of {limit} {PERIOD_WORDS[budget.period]}"


def left(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return what of a budget is neither used nor held: ``llm: 76.08 of 100.00 USD left this month``."""
    budget, when = standing.budget, PERIOD_WORDS[standing.budget.period]
    if not is_open:
        return f"{name}: {'used up' if standing.is_used_up else 'not used up'} {when}"
    limit = amount_words(budget, budget.limit, currency)
    there = amount_words(budget, max(0, standing.left), currency).removesuffix(f" {limit.rpartition(' ')[2]}")
    return f"{name}: {there} of {limit} left {when}"


def refused(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return why a run cannot start in this period."""
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


def warning(name: str, standing: Standing, currency: str, *, is_open: bool, mark: int = 0) -> str:
    """Return how much of a budget is used, and what follows.

    `mark` picks one of the reached marks; 0 for the last.
    """
    mark = mark or max(standing.reached, default=0)
    is_hard, when, amounts = standing.budget.hard, _when(standing), _amounts(standing, currency, is_open=is_open)
    if mark == CLOSED:
        count = len(standing.stop)
        stops = f"{count} {'run is' if count == 1 else 'runs are'} stopped" if count else "it has stopped runs"
        then = "those that were placed last; the others go on while what is left pays for them, and nothing new starts"
        return f"budget {name!r} is closed {when}: what is left does not pay for all its runs{amounts}; {stops}, {then}"
    if mark == FULL:
        then = "its runs are stopped, with their grace for a checkpoint" if is_hard else "nothing new starts"
        return f"{_is_used_up(name, standing, currency, is_open=is_open)}; {then}"
    then = (
        "at 100 % its runs are stopped, with their grace for a checkpoint" if is_hard else "at 100 % nothing new starts"
    )
    if standing.percent >= mark:
        return f"budget {name!r} is at {int(standing.percent)} % {when}{amounts}; {then}"
    return f"{mark} % of budget {name!r} {when} is used, or held for runs that go on{amounts}; {then}"


def goes_on(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return the message to a run that goes on when a budget has stopped others; as `refused`."""
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    return (
        f"budget {name!r} does not pay for all its runs any more {when}{amounts}: those that were placed last are"
        " stopped; this one goes on while what is left pays for it"
    )


def no_room(name: str, standing: Standing) -> str:
    """Return why a run that a budget has no room for waits; the same for as long as it waits for the same."""
    when = _when(standing)
    if standing.is_spent:
        return f"budget {name!r} is used up {when}; {anew(standing)}"
    if standing.is_closed:
        return f"budget {name!r} has stopped runs {when}, and is closed; {anew(standing)}"
    return (
        f"budget {name!r} has no room for it: what is left {when} is less than its first minute,"
        f" or held for runs that go on; {anew(standing)}"
    )


def _is_used_up(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    said = f": {used_words(standing, currency)}" if is_open else f" {_when(standing)}"
    return f"budget {name!r} is used up{said}"


def _when(standing: Standing) -> str:
    return PERIOD_WORDS[standing.budget.period]


def _amounts(standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return how much is used, in brackets: for those who may know it."""
    return f" ({used_words(standing, currency).removesuffix(_when(standing))}used)" if is_open else ""


def anew(standing: Standing) -> str:
    """Return when the next period begins, in words."""
    return f"the next period begins on {next_day(standing)}"


def next_day(standing: Standing) -> str:
    """Return the day on which the next period begins, with its time zone: ``2026-12-01 (UTC)``."""
    budget = standing.budget
    return f"{format_day(local_day(standing.window.end_ns, budget.zone))} ({budget.time_zone or 'UTC'})"
