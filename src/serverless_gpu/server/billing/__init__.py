"""Money: prices, charges, costs of a run, usage reports.

`charging.py` runs as a loop. `price_service.py` and `usage_reports.py` contain the services and their routes.
`model/billing` makes the decisions.
"""
