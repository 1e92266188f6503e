"""Routes of `wire/billing.py`: how much somebody may use, and how much of it is used."""

from __future__ import annotations

from serverless_gpu.server.budgets.budget_service import BudgetService
from serverless_gpu.server.http.routing import Call, Routes, reading, writing
from serverless_gpu.wire.billing import BudgetList, BudgetRequest, BudgetView

routes = Routes("budgets")


@routes.get("/budgets", needs=reading("budgets"))
def list_budgets(call: Call, budgets: BudgetService) -> BudgetList:
    """List budgets and how they stand: one's own, and those of one's teams."""
    return budgets.view_all(call.who, call.reach)


@routes.get("/budgets/{name}", needs=reading("budgets"))
def show_budget(call: Call, budgets: BudgetService, name: str) -> BudgetView:
    """Show a budget and how it stands."""
    return budgets.view(call.who, call.reach, name)


@routes.put("/budgets/{name}", needs=writing("budgets"))
def put_budget(call: Call, budgets: BudgetService, name: str, body: BudgetRequest) -> BudgetView:
    """Make a budget, or put another one in its place; what was used in its period counts from its beginning."""
    return budgets.put(call.who, name, body)


@routes.post("/budgets/{name}/reopen", needs=writing("budgets"))
def reopen_budget(call: Call, budgets: BudgetService, name: str) -> BudgetView:
    """Open a hard budget again that has stopped runs and of which something is left."""
    return budgets.reopen(call.who, name)


@routes.delete("/budgets/{name}", needs=writing("budgets"))
def delete_budget(call: Call, budgets: BudgetService, name: str) -> BudgetView:
    """Delete a budget; a run that was asked to stop stops all the same."""
    return budgets.delete(call.who, name)
