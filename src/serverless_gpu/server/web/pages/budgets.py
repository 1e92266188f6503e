"""Shows budgets with their forecast, and creates, changes, reopens and deletes budgets."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.errors import InvalidValue, ServerlessGpuError
from serverless_gpu.model.billing.budget import CLOSED, FULL, Period, ScopeKind
from serverless_gpu.server.budgets import budget_service
from serverless_gpu.server.core.hub import BUDGETS, CHARGED
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Query, Routes, reading, writing
from serverless_gpu.server.web import form_values
from serverless_gpu.server.web.list_pages import page_of
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site
from serverless_gpu.units import MICROS_PER_UNIT, MS_PER_HOUR, format_gpu_ms, format_micros
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX
from serverless_gpu.wire.billing import BudgetRequest, BudgetView

routes = Routes("budget-pages", mount=WEB)
KINDS: tuple[ScopeKind, ...] = ("everything", "user", "team", "pool", "policy", "tag")
_Text = Annotated[str, msgspec.Meta(max_length=1_024)]


class BudgetForm(Form, frozen=True, kw_only=True):
    """A budget as a person types it. `amount` is in the server's currency or in GPU-hours."""

    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    kind: ScopeKind = "everything"
    scope: _Text = ""
    period: Period = Period.MONTH
    unit: Annotated[str, msgspec.Meta(pattern="^(money|time)$")] = "money"
    amount: Annotated[str, msgspec.Meta(max_length=40)] = ""
    hard: Annotated[str, msgspec.Meta(pattern="^(yes)?$")] = ""
    time_zone: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def request(self) -> BudgetRequest:
        """Return the request to the API."""
        is_money = self.unit == "money"
        limit = form_values.amount("limit", self.amount, unit=MICROS_PER_UNIT if is_money else MS_PER_HOUR)
        return BudgetRequest(
            kind=self.kind,
            scope="" if self.kind == "everything" else self.scope.strip(),
            period=self.period,
            limit_micros=limit if is_money else None,
            limit_gpu_ms=None if is_money else limit,
            hard=bool(self.hard),
            time_zone=self.time_zone.strip(),
        )


class BudgetsPageQuery(Query, frozen=True, kw_only=True):
    """Filter by a part of the name or scope, and the last name of the previous page."""

    text: _Text = ""
    after: _Text = ""


@routes.get("/budgets", needs=reading("budgets"))
def show_budgets(call: Call, site: Site, query: BudgetsPageQuery) -> Page:
    """List budgets, alarms and notices."""
    return _list_page(call, site, BudgetForm(), query)


@routes.post("/budgets", needs=writing("budgets"), limit=FORM_BYTES_MAX)
def create_budget(call: Call, site: Site, body: BudgetForm) -> Page | Redirect:
    """Create a budget, and refuse a name that another budget has."""
    try:
        if not body.name:
            raise InvalidValue("the budget has no name")
        there = site.ask(call, budget_service.list_budgets)
        if body.name in {one.name for one in there.budgets}:
            raise InvalidValue(f"there is already a budget {body.name!r}", hint="open the budget to change it")
        site.ask(call, budget_service.put_budget, name=body.name, body=body.request())
    except ServerlessGpuError as problem:
        return form_values.with_problem(_list_page(call, site, body, BudgetsPageQuery()), problem)
    return Redirect(path=f"/budgets/{body.name}")


@routes.get("/budgets/{name}", needs=reading("budgets"))
def show_budget(call: Call, site: Site, name: str) -> Page:
    """Show a budget with its history."""
    return _budget_page(call, site, name, None)


@routes.post("/budgets/{name}", needs=writing("budgets"), limit=FORM_BYTES_MAX)
def change_budget(call: Call, site: Site, name: str, body: BudgetForm) -> Page | Redirect:
    """Change a budget."""
    try:
        site.ask(call, budget_service.put_budget, name=name, body=body.request())
    except ServerlessGpuError as problem:
        return form_values.with_problem(_budget_page(call, site, name, body), problem)
    return Redirect(path=f"/budgets/{name}")


@routes.post("/budgets/{name}/reopen", needs=writing("budgets"), limit=FORM_BYTES_MAX)
def reopen_budget(call: Call, site: Site, name: str, body: Form) -> Page | Redirect:
    """Reopen a budget that has stopped runs."""
    try:
        site.ask(call, budget_service.reopen_budget, name=name)
    except ServerlessGpuError as problem:
        return form_values.with_problem(_budget_page(call, site, name, None), problem)
    return Redirect(path=f"/budgets/{name}")


@routes.post("/budgets/{name}/delete", needs=writing("budgets"), limit=FORM_BYTES_MAX)
def delete_budget(call: Call, site: Site, name: str, body: Form) -> Redirect:
    """Delete a budget."""
    site.ask(call, budget_service.delete_budget, name=name)
    return Redirect(path="/budgets")


def _list_page(call: Call, site: Site, form: BudgetForm, query: BudgetsPageQuery) -> Page:
    found = site.ask(call, budget_service.list_budgets)
    text = query.text.casefold()
    named = [one for one in found.budgets if text in f"{one.name} {one.kind} {one.scope}".casefold()]
    return site.page(
        call,
        "budgets.html",
        title="Budgets",
        nav="budgets",
        wakes=(BUDGETS, CHARGED),
        page=page_of(named, lambda one: one.name, query.after),
        total=len(found.budgets),
        query=query,
        alarms=found.alarms,
        notices=site.ask(call, budget_service.list_notices).notices,
        form=form,
        kinds=KINDS,
        amount_text=amount_text,
        limit_of=limit_of,
        problem=None,
    )


def _budget_page(call: Call, site: Site, name: str, form: BudgetForm | None) -> Page:
    budget = site.ask(call, budget_service.show_budget, name=name)
    notices = site.ask(call, budget_service.list_notices).notices
    return site.page(
        call,
        "budget.html",
        title=f"Budget {name}",
        nav="budgets",
        wakes=(BUDGETS, CHARGED),
        budget=budget,
        history=site.ask(call, budget_service.budget_history, name=name).marks,
        notices=[one for one in notices if one.subject == name],
        form=form or form_of(budget),
        kinds=KINDS,
        amount_text=amount_text,
        limit_of=limit_of,
        usage=_usage_address(budget),
        full=FULL,
        closed=CLOSED,
        problem=None,
    )


def form_of(budget: BudgetView) -> BudgetForm:
    """Return the form with a budget's current values."""
    is_money = budget.limit_micros is not None
    limit, unit = limit_of(budget), MICROS_PER_UNIT if is_money else MS_PER_HOUR
    whole, rest = divmod(limit, unit)
    return BudgetForm(
        name=budget.name,
        kind=budget.kind,
        scope=budget.scope,
        period=budget.period,
        unit="money" if is_money else "time",
        amount=f"{whole}.{round(rest * 1_000_000 / unit):06d}".rstrip("0").rstrip("."),
        hard="yes" if budget.hard else "",
        time_zone=budget.time_zone,
    )


def limit_of(budget: BudgetView) -> int:
    """Return the limit in millionths of the currency unit or in GPU-milliseconds."""
    return budget.limit_micros if budget.limit_micros is not None else budget.limit_gpu_ms or 0


def amount_text(budget: BudgetView, amount: int) -> str:
    """Return an amount in the unit of a budget."""
    return format_micros(amount, budget.currency) if budget.limit_micros is not None else format_gpu_ms(amount)


def _usage_address(budget: BudgetView) -> dict[str, str]:
    """Return the parameters of the usage page for the scope of a budget."""
    if budget.kind == "everything":
        return {"by": "user"}
    if budget.kind == "tag":
        return {"by": "user", "tag": budget.scope} if "=" in budget.scope else {"by": f"tag:{budget.scope}"}
    return {"by": "name", budget.kind: budget.scope}
