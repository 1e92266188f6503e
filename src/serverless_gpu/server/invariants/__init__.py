"""Checks invariants of the database, in tests and while the server runs.

The self-check loop runs `self_check.py` over `invariant_inputs.py`. `run_invariants.py` lists the invariants.
"""
