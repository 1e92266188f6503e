"""Budgets: admission checks, enforcement for active runs, alarms and notices.

`budget_enforcer.py` stops runs over a hard limit every few seconds. `budget_service.py` has the routes. Start with
`spending.py`, which keeps the standing of every budget in memory.
"""
