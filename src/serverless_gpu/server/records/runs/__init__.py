"""SQL and row values of runs: runs, attempts, crews, orders, events, facts, files.

Start with `runs.py`, which inserts, finds and pages runs.
"""
