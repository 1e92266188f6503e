"""Contains the engines, which place gangs on machines.

`base.py` defines the engine interface. `local.py` uses the server's machine, `ray/` uses a Ray cluster, and
`simulated_engine.py` simulates machines.
"""
