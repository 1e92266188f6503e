"""Isolation of principals on a node: uids, sandboxes, and the files that an attempt gets.

The agent and the supervisor use this package. Read `principals.py` first, then `node/inside/sandbox.py`, which builds
the sandbox inside the launched processes.
"""

SPAWNER = "SERVERLESS_GPU_SPAWNER"
"""Variable with the path of the spawner's socket, for a node without the rights of root."""
