"""Budgets: limits of use per day, week or month, and their use.

GET    /budgets                          → BudgetList    as far as the caller may see it
GET    /budgets/{name}                   → BudgetView
PUT    /budgets/{name}   BudgetRequest   → BudgetView    made, or put in the place of another
POST   /budgets/{name}/reopen            → BudgetView    one that has stopped runs lets others start again
DELETE /budgets/{name}                   → BudgetView    as it was
"""

from __future__ import annotations

from serverless_gpu.model.billing.budget import Period, ScopeKind
from serverless_gpu.wire.base import Answer, Request


class BudgetView(Answer, frozen=True, kw_only=True):
    """A budget, and how it stands now. Money is millionths of `currency`, GPU time is GPU-milliseconds.

    Attributes:
        kind: whose use counts: "everything", "user", "team", "pool", "policy", "tag".
        scope: their name; of a tag ``key=value``, or ``key`` for each run that has it.
        limit_micros: exactly one of the two limits is there; `limit_gpu_ms` the other.
        hard: whether runs are stopped when it is used up; else they finish, and nothing new starts.
        start_ns: when its period began, nanoseconds since 1970; `end_ns` when the next one begins.
        used: in the unit of the limit; `held` what goes on holds beside that.
        percent: of the limit that is used.
        unpriced_ms: device-milliseconds of its runs that have no price, and count nothing for a budget of money.
        going_on: how many attempts count for it now.
        forecast: what will be used at the end of the period at the rate of the last days.
        per_day: that rate.
        reached_ns: when it is used up at that rate; None: not in this period.
        basis: what the forecast rests on, in words.
        sentence: how it stands, in words.
        time_zone: of its periods.
    """

    name: str
    kind: ScopeKind
    scope: str
    period: Period
    currency: str
    limit_micros: int | None
    limit_gpu_ms: int | None
    hard: bool
    start_ns: int
    end_ns: int
    used: int
    held: int
    percent: float
    unpriced_ms: int
    going_on: int
    forecast: int
    per_day: int
    reached_ns: int | None
    basis: str
    sentence: str
    time_zone: str = "UTC"


class AlarmView(Answer, frozen=True, kw_only=True):
    """Somebody who spent far more than they are used to.

    Attributes:
        at_ns: when that was seen, nanoseconds since 1970.
        subject: who: "run <id>" or "team <name>".
        sentence: what was seen.
    """

    at_ns: int
    subject: str
    sentence: str


class BudgetList(Answer, frozen=True, kw_only=True):
    """Budgets by name, and the alarms of the last seven days, latest first."""

    budgets: tuple[BudgetView, ...]
    alarms: tuple[AlarmView, ...] = ()


class BudgetRequest(Request, frozen=True, kw_only=True):
    """Make a budget, or put another one in its place; one of the two limits. Money is in the server's currency."""

    kind: ScopeKind
    scope: str = ""
    period: Period
    limit_micros: int | None = None
    limit_gpu_ms: int | None = None
    hard: bool = False
    time_zone: str = ""
