"""Implements the engine for Ray clusters, and adds machines to a cluster.

The server uses `ray_engine.py`, the best module to read first. The engine's child process `driver_process.py` calls
Ray. `sgpu up` and `sgpu join` use `pool_join.py` and `ray_keeper.py` to keep Ray running on a machine.
"""
