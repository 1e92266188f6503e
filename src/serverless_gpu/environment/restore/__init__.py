"""Restores an environment from a snapshot in a store to a tree on a node.

The agent's restore process calls `restore.py`. `sgpu env restore` calls `export.py`. `cache/` manages the units on a
node.
"""
