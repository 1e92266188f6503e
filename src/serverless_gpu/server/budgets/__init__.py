"""Budgets: their routes, admission of a run, enforcement while runs go on, alarms and notices.

`budget_enforcer.py` stops runs over a hard limit every few seconds. Start with `spending.py`, the sums in memory.
"""
