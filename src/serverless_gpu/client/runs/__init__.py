"""Run handles: waiting, results, receipts, logs, futures, lists and attachment. Start with `run.py`."""
