"""The calling process: its program, its context, its MLflow, where its modules come from, and its signals.

The launch package describes the caller with it. Start with `caller_context.py`.
"""
