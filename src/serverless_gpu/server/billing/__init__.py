"""Money: prices, charges, costs of a run, usage reports.

The ledger loop runs `charging.py`; routes call `usage_reports.py`. Decisions are in `model/billing`.
"""
