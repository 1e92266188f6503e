"""Starts, observes and ends the ranks of an attempt, in one supervisor process per attempt.

The supervisor follows the state machine in `model/lifecycle/attempt_lifecycle.py` and writes the receipt. Start reading
with `supervisor.py`, whose docstring shows the processes and lists the failure cases. `hang_watchdog.py` detects hangs
and idle devices. `gang.py` exchanges messages with the ranks of this node. `rendezvous.py` exchanges messages with the
supervisors of other nodes.
"""
