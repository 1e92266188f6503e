"""Contains the scheduler, reconciler, queue snapshot, planner state and feasibility checks.

`scheduler.py` places runs and stores their attempts and orders. `reconciler.py` compares running attempts with the
reports of the nodes. `model/scheduling` contains the scheduling algorithm.
"""
