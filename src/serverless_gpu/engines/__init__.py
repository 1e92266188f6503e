"""Where gangs can be placed: this machine (`local.py`), a Ray cluster (`ray/`), machines of tests (`simulated_engine.py`).

`base.py` has the interface.
"""
