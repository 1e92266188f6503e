"""Run and attempt lifecycle on the server: transitions, reports, leases, rendezvous, hangs, endings.

`reports.py` applies the reports of nodes. `transitions.py` writes the decisions of
`model/lifecycle/run_lifecycle.py`. Failure cases: A silent node loses its lease (`liveness.py`). After a crash the
reconciler repeats unfinished work.
"""
