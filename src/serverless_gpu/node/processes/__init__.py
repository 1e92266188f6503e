"""Processes of a node: starts processes, ends whole process trees, and removes their shared memory.

The supervisor and the agent use this package. Start with `process_tree.py`.
"""
