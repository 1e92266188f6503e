"""Commands that run a server and look at it: `up`, `server`.

Start with `up.py`; `operations.py` has the operator's other tasks.
"""
