"""Processes of a node: starting one, ending a whole tree, shared memory that it left.

The supervisor and the agent call it. Start with `process_tree.py`.
"""
