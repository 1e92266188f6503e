"""Money: prices, the ledger, metering, budgets, usage reports and advice on how many GPUs to reserve.

An attempt's facts become segments (`metering.py`), then ledger entries (`ledger.py`) at a price (`pricing.py`).
The server's billing and budgets packages and `sgpu advise` call it. Start with `ledger.py`.
"""
