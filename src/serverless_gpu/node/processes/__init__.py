"""Processes of a node: starts processes, ends whole process trees, and removes their shared memory.

The supervisor and the agent use this package. To read the code, start with `process_tree.py`.
"""
