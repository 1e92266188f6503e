"""Tracks runs in MLflow: tracker interface (`base.py`), REST client, and deliveries with retries.

A node's monitor process runs one delivery (`delivery.py`) per attempt.
"""
