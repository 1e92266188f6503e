"""Lifecycle of a run and of its attempts as tables: events in, instructions out.

The supervisor drives `attempt_lifecycle.py`, the server drives `run_lifecycle.py`. Start with `attempt.py`, which has
the states and reasons.
"""
