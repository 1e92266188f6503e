"""The life of runs and attempts on the server: transitions, reports, leases, rendezvous, hangs, endings.

`reports.py` applies what nodes report; `transitions.py` writes what `model/lifecycle/run_lifecycle.py` decides. Failure
cases: a node that is silent loses its lease (`liveness.py`), a crash leaves work that the reconciler repeats.
"""
