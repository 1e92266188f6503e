"""Lifecycle of a run, of its attempts and of gangs on several nodes as tables: events in, instructions out.

The supervisor drives `attempt_lifecycle.py`, the server drives `run_lifecycle.py` and `gang_lifecycle.py`; crews meet
by `rendezvous.py`. Start with `attempt.py`, which has the states and reasons.
"""
