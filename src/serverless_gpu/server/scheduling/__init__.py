"""The scheduler and the reconciler, with queue snapshot, planner state and feasibility checks.

Each tick of `scheduler.py` writes attempts and orders in one transaction. `reconciler.py` completes work that a crash
interrupted. `model/scheduling` contains the scheduling algorithm.
"""
