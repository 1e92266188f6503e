"""One node's share of a run's private Ray cluster; standard library only, like everything in `inside/`.

A rank with a cluster becomes the node task (`task.py`, start there). It starts Ray (`ray_start.py`) and the driver in a
pid namespace (`pid_namespace.py`). `cluster.py` and `link.py` join the nodes, `share.py` has the message and the files,
`metrics.py` reads Ray's metrics.
"""
