"""The scheduler: the snapshot of the queue, the planner's state, a tick, feasibility, the reconciler.

A tick of `scheduler.py` writes attempts and orders in one transaction. `reconciler.py` repeats work that a crash left
unfinished. `model/scheduling` makes the decisions.
"""
