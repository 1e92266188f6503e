"""Money: prices, charges, costs of a run, usage reports.

`charging.py` runs as a loop; routes stand below their service, in `price_service.py` and `usage_reports.py`. Decisions
are in `model/billing`.
"""
