"""Tracking of runs in MLflow: the interface (`base.py`), the REST client, and deliveries with retries.

The monitor of a node runs a delivery (`delivery.py`) for each attempt.
"""
