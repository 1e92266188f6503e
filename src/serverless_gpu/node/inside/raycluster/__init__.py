"""A node's share of a run's private Ray cluster, with the standard library only.

A rank with a cluster becomes the node task (`task.py`, start there). The node task starts Ray (`ray_start.py`) and the
driver in a pid namespace (`pid_namespace.py`). `cluster.py` and `link.py` connect the nodes. `share.py` defines the
supervisor's message and the cluster's files. `metrics.py` reads Ray's metrics.
"""
