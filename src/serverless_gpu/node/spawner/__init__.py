"""The rights of root on a node: a few verbs, and the process that executes the verbs.

Read `verbs.py` first. `process.py` serves the verbs to the account of the agent, and `client.py` calls them. Without
root, `namespace_process.py` serves them in a user namespace.
"""

SOCKET = "/run/serverless-gpu/spawner.sock"
"""Default path of the spawner's socket."""
