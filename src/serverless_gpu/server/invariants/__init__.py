"""Invariants: what must hold of the database, checked in tests and while the server works.

The self-check loop runs `self_check.py` over `invariant_inputs.py`. `run_invariants.py` lists the invariants.
"""
