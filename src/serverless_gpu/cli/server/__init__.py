"""Commands that run a server and look at it: `up.py`, and `operations.py` with the operator's other tasks."""
