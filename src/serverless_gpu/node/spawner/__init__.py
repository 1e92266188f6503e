"""The rights of root on a node: a few verbs, and the process that executes the verbs.

Read `verbs.py` first. `process.py` serves the verbs to the account of the agent, and `client.py` calls them.
"""

SOCKET = "/run/serverless-gpu/spawner.sock"
"""Default path of the spawner's socket."""
VARIABLE = "SERVERLESS_GPU_SPAWNER"
"""Variable with the path of the spawner's socket, for a node without the rights of root."""
