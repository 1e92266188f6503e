"""The scheduler: what the planner knows, a tick, preemption, start limits, the reconciler.

A tick of `scheduler.py` writes attempts and orders in one transaction; `reconciler.py` repeats what a crash left
undone. Decisions are in `model/scheduling`.
"""
