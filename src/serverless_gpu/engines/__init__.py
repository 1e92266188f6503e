"""Engines, which place gangs on machines.

`local.py` places gangs on this machine, `ray/` on a Ray cluster, `simulated_engine.py` on simulated machines. `base.py`
defines the interface.
"""
