"""Checks database invariants in tests and in running servers.

`run_invariants.py` defines the invariants. The self-check loop in `self_check.py` checks the rows that
`invariant_inputs.py` loads.
"""
