"""Run and attempt lifecycle on the server: transitions, reports, leases, rendezvous, hangs, endings.

`reports.py` stores the reports of nodes. `transitions.py` writes the decisions of `model/lifecycle/run_lifecycle.py`.
If a node stays silent, the server ends its attempts (`liveness.py`). After a server crash, the reconciler completes
unfinished work.
"""
