"""Isolation of principals on a node: uids, sandboxes, and the files that an attempt gets.

The agent and the supervisor use this package. Read `principals.py` first, then `node/inside/sandbox.py`, which builds
the sandbox inside the launched processes.
"""
