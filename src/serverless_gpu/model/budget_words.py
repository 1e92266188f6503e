"""What people read of a budget: how much is left, why a run is refused, waits, is warned or stopped.

Whoever may not see the amounts reads the same sentence without them. Values only: no clock, no database.
"""

from __future__ import annotations

from serverless_gpu import units
from serverless_gpu.model.budget import Budget, Period, Standing, Window
from serverless_gpu.model.days import DAY_NS, format_day

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
