"""Telemetry: samples of a node, what is written to MLflow, and idle devices.

The monitor and the tracking package call it. Start with `samples.py`.
"""
