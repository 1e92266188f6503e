"""Runs one process per attempt that starts, observes and ends ranks, and writes the receipt.

The supervisor follows the state machine in `model/lifecycle/attempt_lifecycle.py`. To read the code, start with
`supervisor.py`: its docstring shows the processes and lists the failure cases. `hang_watchdog.py` detects hangs and
idle devices. `gang.py` exchanges messages with the ranks of this node. `rendezvous.py` exchanges messages with the
supervisors of other nodes.
"""
