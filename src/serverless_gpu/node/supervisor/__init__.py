"""The supervisor: one process per attempt that starts, watches and ends ranks, and writes the receipt.

It drives `model/lifecycle/attempt_lifecycle.py`. Start with `supervisor.py`; its docstring has the picture and the
failure cases. `hang_watchdog.py` runs hang and idle detection, `gang.py` speaks with the ranks of this node,
`rendezvous.py` with the other nodes.
"""
