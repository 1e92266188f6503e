"""Handles of runs: wait, results, receipts, logs, futures, lists and attachment. Start with `run.py`."""
