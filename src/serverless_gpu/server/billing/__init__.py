"""Billing: prices, charges, costs of a run, usage reports.

`charging.py` contains the charging loop. `price_service.py` and `usage_reports.py` contain the services and their
routes. `model/billing` contains the calculations.
"""
