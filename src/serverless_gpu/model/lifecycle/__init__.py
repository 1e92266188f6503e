"""State machines of runs, attempts and multi-node gangs, which turn events into instructions.

The supervisor drives `attempt_lifecycle.py`. The server drives `run_lifecycle.py` and `gang_lifecycle.py`. The nodes of
a gang use `rendezvous.py` to connect. Start with `attempt.py`, which defines the states and reasons.
"""
