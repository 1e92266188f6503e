"""Lifecycle tables of runs, of attempts and of gangs on several nodes: events in, instructions out.

The supervisor drives `attempt_lifecycle.py`. The server drives `run_lifecycle.py` and `gang_lifecycle.py`. The nodes of
a gang connect with `rendezvous.py`. Start with `attempt.py`, which has the states and reasons.
"""
