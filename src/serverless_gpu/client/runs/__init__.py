"""Handles of runs: wait, results, receipts, logs, futures, lists and finding a run again.

Users hold a `Run`; local and remote runs share it. Start with `run.py`; `outcome.py` decides what a caller gets.
"""
