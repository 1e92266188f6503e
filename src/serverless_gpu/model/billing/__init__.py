"""Prices, ledger, metering, budgets, usage reports, and advice on the number of GPUs to reserve.

`metering.py` turns an attempt's facts into time segments. `ledger.py` turns segments into ledger entries at the prices
of `pricing.py`. The server's billing and budgets packages and `sgpu advise` use this package. Start with `ledger.py`.
"""
