"""The Ray engine: a Ray cluster as an engine, and a machine that joins it.

The server asks `ray_engine.py`, which speaks with Ray in a child process (`driver_process.py`); `sgpu up` and
`sgpu join` keep Ray running on a machine (`ray_keeper.py`, `pool_join.py`). Start with `ray_engine.py`.
"""
