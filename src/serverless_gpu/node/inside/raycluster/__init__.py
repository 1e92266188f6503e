"""One node's part of a run's private Ray cluster, implemented with the standard library.

A rank with a Ray cluster becomes the cluster's node task. Start reading at `task.py`. The node task starts Ray
(`ray_start.py`) and the driver in a pid namespace (`pid_namespace.py`). `cluster.py` and `link.py` connect the nodes.
`share.py` defines the supervisor's message and the cluster's file names. `metrics.py` reads Ray's metrics.
"""
