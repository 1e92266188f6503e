"""Uses a Ray cluster as an engine and adds machines to the cluster.

The server calls `ray_engine.py`. A child process of the engine (`driver_process.py`) calls Ray. `sgpu up` and `sgpu
join` keep Ray running on a machine (`ray_keeper.py`, `pool_join.py`). Start reading with `ray_engine.py`.
"""
