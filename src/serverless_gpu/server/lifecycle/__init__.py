"""Manages the lifecycle of runs and attempts on the server.

`reports.py` stores the nodes' reports. `transitions.py` writes the decisions of `model/lifecycle/run_lifecycle.py`.
`liveness.py` ends the attempts of silent nodes. After a server crash, the reconciler completes interrupted operations.
"""
