"""Starts a node's processes, ends process trees, and removes shared memory of ended processes.

The supervisor and the agent use this package. Start reading the code at `process_tree.py`.
"""
