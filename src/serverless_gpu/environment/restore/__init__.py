"""Restores an environment: a snapshot in a store becomes a tree that Python can be started in.

The agent's restore process calls `restore.py`, `sgpu env restore` calls `export.py`. `cache/` has the units of a node.
"""
