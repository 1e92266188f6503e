"""Budgets: admission checks, enforcement for active runs, alarms and notices.

`budget_enforcer.py` stops runs over a hard limit every few seconds. `budget_service.py` has the routes. Start reading
with `spending.py`, which computes the standing of every budget in memory.
"""
