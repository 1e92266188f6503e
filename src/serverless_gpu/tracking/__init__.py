"""Tracking of runs in MLflow: the port (`base.py`), MLflow over REST, and deliveries that continue when it was away.

The monitor of a node runs a `delivery.py` for each attempt.
"""
