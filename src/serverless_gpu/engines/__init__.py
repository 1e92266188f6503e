"""Where gangs can be placed: this machine (`local.py`), a Ray cluster (`ray/`), simulated machines.

`base.py` has the interface.
"""
