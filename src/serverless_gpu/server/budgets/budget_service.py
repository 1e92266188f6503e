"""Manages budgets: defines the budget service and its HTTP routes.

After each budget change, the service adds an audit entry and wakes the scheduler and the budget loop.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotFound, TooLarge
from serverless_gpu.model import access_control
from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.model.billing.budget import (
    Budget,
    Scope,
    Standing,
    forecast,
    next_day_text,
    renewal_text,
    used_text,
)
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.hardware import time_unit
from serverless_gpu.model.spec import TAG_CHARACTERS_MAX
from serverless_gpu.server.budgets.budget_admission import BudgetAdmission
from serverless_gpu.server.budgets.spending import Spending
from serverless_gpu.server.core.caller import Caller, check_name, check_time_zone
from serverless_gpu.server.core.hub import BUDGETS, SCHEDULER, Hub
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, reading, writing
from serverless_gpu.server.records import audit, budgets, policies, pools, principals
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.budgets import Notice, NoticeKind, StoredBudget
from serverless_gpu.units import format_gpu_ms, format_micros
from serverless_gpu.wire.billing import (
    AlarmView,
    BudgetHistory,
    BudgetList,
    BudgetMark,
    BudgetRequest,
    BudgetView,
    NoticeList,
    NoticeView,
)

BUDGETS_MAX = 1_000
MICROS_MAX = 10**15
GPU_MS_MAX = 10**15
"""Maximum limit of a budget: a thousand million units of money, or 280 million GPU-hours."""
ALARM_DAYS = 7
ALARMS_MAX = 50
MARKS_MAX = 100
NOTICES_MAX = 50
NOTICES_READ = 1_000
"""Number of notices that the server reads for one list, before it removes notices that the caller may not see."""


class BudgetService:
    """Lists, sets, reopens and deletes budgets."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        spending: Spending,
        budget_admission: BudgetAdmission,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._spending = spending
        self._budget_admission = budget_admission

    def view_all(self, who: Caller, reach: str) -> BudgetList:
        """Return the budgets and alarms of the caller and of the caller's teams."""
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> tuple[dict[str, Standing], list[AlarmView]]:
            standings = self._standings(connection)
            since_ns = at_ns - ALARM_DAYS * DAY_NS
            told = [
                one
                for one in budgets.alarms(connection, since_ns=since_ns)
                if access_control.covers(
                    reach, name=who.name, teams=who.teams, owner=one.text("owner"), team=one.text("team")
                )
            ]
            return standings, [
                AlarmView(at_ns=one.at_ns, subject=one.text("subject"), sentence=one.text("sentence"))
                for one in told[:ALARMS_MAX]
            ]

        standings, alarms = self._database.read(work)
        seen = {name: each for name, each in standings.items() if _may_see(each.budget, who, reach)}
        return BudgetList(budgets=tuple(self._views(seen)), alarms=tuple(alarms))

    def view(self, who: Caller, reach: str, name: str) -> BudgetView:
        """Return one budget that the caller may see."""
        standings = self._database.read(lambda connection: self._standings(connection))
        if name not in standings or not _may_see(standings[name].budget, who, reach):
            raise _unknown(name)
        (view,) = self._views({name: standings[name]})
        return view

    def history(self, who: Caller, reach: str, name: str) -> BudgetHistory:
        """Return the reached thresholds of a budget that the caller may see."""
        self.view(who, reach, name)
        found = self._database.read(lambda connection: budgets.warnings_of(connection, name, limit=MARKS_MAX))
        return BudgetHistory(marks=tuple(BudgetMark(**one._asdict()) for one in found))

    def notices(self, who: Caller, reach: str) -> NoticeList:
        """Return the latest notices of the caller's visible budgets, and visible alarms."""
        found = self._database.read(lambda connection: budgets.latest_notices(connection, limit=NOTICES_READ))
        seen = [_notice_view(one) for one in found if _may_see_notice(one, who, reach)]
        return NoticeList(notices=tuple(seen[:NOTICES_MAX]))

    def put(self, who: Caller, name: str, asked: BudgetRequest) -> BudgetView:
        """Create or replace a budget. Usage since the start of the current budget period counts."""
        check_name("a budget", name)
        said = self._budget(asked)
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> None:
            _check_scope(connection, said.scope)
            check_time_zone(said.time_zone)
            usual = budgets.team_zone(connection, said.scope) or "UTC"
            # A budget without a time zone follows the time zone of its team.
            budget = msgspec.structs.replace(said, time_zone="") if said.time_zone == usual else said
            before = budgets.find(connection, name)
            if before is None and budgets.count(connection) >= BUDGETS_MAX:
                raise TooLarge(f"this server already has {BUDGETS_MAX} budgets, the maximum", hint="delete a budget")
            budgets.put(connection, StoredBudget(name=name, budget=budget, set_ns=at_ns))
            if before is not None and before.budget != budget:
                # A changed budget is open again. The enforcer repeats the threshold notices of a changed budget.
                budgets.forget_said(connection, name)
            audit.record(
                connection,
                who=who,
                action=Action.BUDGET_SET,
                subject=name,
                now_ns=at_ns,
                detail=_detail(budget) | ({} if before is None else {"before": _detail(before.budget)}),
            )

        self._database.write(work)
        self._ring()
        return self.view(who, AccessReach.ALL, name)

    def reopen(self, who: Caller, name: str) -> BudgetView:
        """Reopen a hard budget that has stopped runs, so that waiting runs can start."""
        at_ns = self._clock.wall_ns()

        now = self._budget_admission.as_of()
        standing = self._database.read(lambda connection: self._spending.look(connection, now)).get(name)
        if standing is None:
            raise _unknown(name)
        if standing.is_spent:
            raise InvalidValue(
                f"budget {name!r} is used up: {used_text(standing, self._settings.currency)}",
                hint=f"raise the budget with `sgpu budget set {name}`, or wait: {renewal_text(standing)}",
            )

        def work(connection: sa.Connection) -> None:
            if budgets.find(connection, name) is None:
                raise _unknown(name)
            if not budgets.reopen(connection, name, start_ns=standing.window.start_ns):
                raise InvalidValue(f"budget {name!r} is already open", hint=f"show the budget: sgpu budget show {name}")
            detail = _detail(standing.budget) | {"used": standing.budget.counts(standing.used)}
            audit.record(connection, who=who, action=Action.BUDGET_REOPEN, subject=name, now_ns=at_ns, detail=detail)

        self._database.write(work)
        self._ring()
        return self.view(who, AccessReach.ALL, name)

    def delete(self, who: Caller, name: str) -> BudgetView:
        """Delete a budget. Runs that the budget already asked to stop still stop."""
        at_ns = self._clock.wall_ns()
        view = self.view(who, AccessReach.ALL, name)

        def work(connection: sa.Connection) -> None:
            before = budgets.find(connection, name)
            if before is None:
                raise _unknown(name)
            budgets.remove(connection, name)
            detail = _detail(before.budget)
            audit.record(connection, who=who, action=Action.BUDGET_DELETE, subject=name, now_ns=at_ns, detail=detail)

        self._database.write(work)
        self._ring()
        return view

    def _standings(self, connection: sa.Connection) -> dict[str, Standing]:
        """Return the cached budget standings. A new computation would read all attempts."""
        known = self._spending.known()
        return self._spending.look(connection, self._budget_admission.as_of()) if known is None else known

    def _ring(self) -> None:
        self._spending.change()
        self._hub.touch(BUDGETS)
        self._hub.touch(SCHEDULER)  # Wake the scheduler, because waiting runs may fit the changed budget.

    def _budget(self, asked: BudgetRequest) -> Budget:
        ours = self._settings.currency
        limits = ((asked.limit_micros, MICROS_MAX), (asked.limit_gpu_ms, GPU_MS_MAX))
        given = [(limit, most) for limit, most in limits if limit is not None]
        if len(given) != 1:
            raise InvalidValue(
                "a budget needs exactly one limit",
                hint="set either a money limit (--money 500) or a GPU time limit (--gpu-hours 100)",
            )
        for limit, most in given:
            if not 0 <= limit <= most:
                said, top = (
                    format_micros(each, ours) if asked.limit_micros is not None else format_gpu_ms(each)
                    for each in (limit, most)
                )
                raise InvalidValue(f"a budget cannot be {said}", hint=f"0 to {top}")
        return Budget(
            scope=Scope(kind=asked.kind, name=asked.scope),
            period=asked.period,
            limit_micros=asked.limit_micros,
            limit_gpu_ms=asked.limit_gpu_ms,
            hard=asked.hard,
            time_zone=asked.time_zone,
        )

    def _views(self, standings: dict[str, Standing]) -> Iterable[BudgetView]:
        now_ns, currency = self._clock.wall_ns(), self._settings.currency
        going = self._spending.going_on()
        for name, standing in sorted(standings.items()):
            budget = standing.budget
            ahead = forecast(standing, self._spending.by_day(name), now_ns)
            yield BudgetView(
                name=name,
                kind=budget.scope.kind,
                scope=budget.scope.name,
                period=budget.period,
                currency=currency,
                limit_micros=budget.limit_micros,
                limit_gpu_ms=budget.limit_gpu_ms,
                hard=budget.hard,
                time_zone=budget.time_zone or "UTC",
                start_ns=standing.window.start_ns,
                end_ns=standing.window.end_ns,
                used=budget.counts(standing.used),
                held=budget.counts(standing.held),
                percent=round(standing.percent, 2),
                unpriced_ms=standing.used.unpriced_ms,
                going_on=sum(name in one.names and not one.spender.is_over for one in going),
                forecast=ahead.amount,
                per_day=ahead.per_day,
                reached_ns=ahead.reached_ns,
                basis=ahead.basis,
                sentence=_sentence(standing, currency),
                closed=standing.is_closed,
            )


def _check_scope(connection: sa.Connection, scope: Scope) -> None:
    """Refuse a budget scope that does not exist. Unknown tags are valid for later runs."""
    kind, name = scope.kind, scope.name
    if kind == "everything":
        if name:
            raise InvalidValue(f"a budget for all runs must not name a scope, but the request names {name[:64]!r}")
    elif kind == "user":
        principals.principal(connection, name)
    elif kind == "team":
        principals.team(connection, name)
    elif kind == "pool":
        if pools.find(connection, name) is None:
            raise InvalidValue(f"there is no pool {name[:64]!r}", hint="list all pools: sgpu pool list")
    elif kind == "policy":
        if policies.find(connection, name) is None:
            raise InvalidValue(f"there is no policy {name[:64]!r}", hint="list all policies: sgpu policy list")
    elif not name.partition("=")[0].strip() or not name.isprintable() or len(name) > 2 * TAG_CHARACTERS_MAX + 1:
        raise InvalidValue(
            f"{name[:64]!r} is not a valid tag", hint="write the tag as key=value, or as key for all values"
        )


def _may_see(budget: Budget, who: Caller, reach: str) -> bool:
    """Return True if the budget belongs to the caller or to one of the caller's teams."""
    kind, name = budget.scope.kind, budget.scope.name
    owner, team = (name if kind == "user" else "", name if kind == "team" else "")
    return access_control.covers(reach, name=who.name, teams=who.teams, owner=owner, team=team)


def _may_see_notice(one: Notice, who: Caller, reach: str) -> bool:
    """Return True if a notice concerns a budget or a run that the caller may see."""
    if one.kind == NoticeKind.ALARM.value:
        owner, team = one.text("owner"), one.text("team")
    else:
        kind, _, name = one.text("scope").partition(" ")
        owner, team = (name if kind == "user" else "", name if kind == "team" else "")
    return access_control.covers(reach, name=who.name, teams=who.teams, owner=owner, team=team)


def _notice_view(one: Notice) -> NoticeView:
    return NoticeView(
        at_ns=one.at_ns,
        kind=one.kind,
        subject=one.text("budget") or one.text("subject"),
        sentence=one.text("sentence"),
        sent=one.sent_ns is not None,
    )


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no budget {name[:64]!r}", hint="list the budgets that you may see: sgpu budget list")


def _detail(budget: Budget) -> dict[str, object]:
    limits = {"limit_micros": budget.limit_micros, "limit_gpu_ms": budget.limit_gpu_ms}
    return {
        "scope": f"{budget.scope.kind} {budget.scope.name}".strip(),
        "period": budget.period.value,
        "hard": budget.hard,
        **({"time_zone": budget.time_zone} if budget.time_zone else {}),
        **{name: limit for name, limit in limits.items() if limit is not None},
    }


def _sentence(standing: Standing, currency: str) -> str:
    parts = [used_text(standing, currency)]
    if standing.is_used_up:
        why = (
            ""
            if standing.is_spent
            else ("the budget is closed, because its remaining amount does not cover another minute of its runs; ")
        )
        parts.append(f"{why}the budget blocks new runs until {next_day_text(standing)}")
    unpriced_ms = standing.used.unpriced_ms
    if unpriced_ms and standing.budget.limit_micros is not None:
        parts.append(
            f"{format_gpu_ms(unpriced_ms, unit=time_unit())} have no price and do not count; set a price: sgpu "
            "price set"
        )
    return "; ".join(parts)


routes = Routes("budgets")


@routes.get("/budgets", needs=reading("budgets"))
def list_budgets(call: Call, budgets: BudgetService) -> BudgetList:
    """List the budgets of the caller and of the caller's teams, with their standings."""
    return budgets.view_all(call.who, call.reach)


@routes.get("/budgets/{name}", needs=reading("budgets"))
def show_budget(call: Call, budgets: BudgetService, name: str) -> BudgetView:
    """Return a budget with its standing."""
    return budgets.view(call.who, call.reach, name)


@routes.get("/budgets/{name}/history", needs=reading("budgets"))
def budget_history(call: Call, budgets: BudgetService, name: str) -> BudgetHistory:
    """Return the thresholds that a budget has reached."""
    return budgets.history(call.who, call.reach, name)


@routes.get("/notices", needs=reading("budgets"))
def list_notices(call: Call, budgets: BudgetService) -> NoticeList:
    """List the latest notices of budgets, and alarms."""
    return budgets.notices(call.who, call.reach)


@routes.put("/budgets/{name}", needs=writing("budgets"))
def put_budget(call: Call, budgets: BudgetService, name: str, body: BudgetRequest) -> BudgetView:
    """Create or replace a budget. Usage since the start of the current budget period counts."""
    return budgets.put(call.who, name, body)


@routes.post("/budgets/{name}/reopen", needs=writing("budgets"))
def reopen_budget(call: Call, budgets: BudgetService, name: str) -> BudgetView:
    """Reopen a hard budget that has stopped runs and is not used up."""
    return budgets.reopen(call.who, name)


@routes.delete("/budgets/{name}", needs=writing("budgets"))
def delete_budget(call: Call, budgets: BudgetService, name: str) -> BudgetView:
    """Delete a budget. Runs that the budget already asked to stop still stop."""
    return budgets.delete(call.who, name)
