"""Budgets: admission of a run, enforcement while runs go on, alarms and notices.

`budget_enforcer.py` stops runs over a hard limit every few seconds; `budget_service.py` has the routes. Start with
`spending.py`, the standing of every budget in memory.
"""
