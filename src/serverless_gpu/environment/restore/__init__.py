"""Restores an environment: turns a snapshot in a store into a tree that Python can start in.

The agent's restore process calls `restore.py`. `sgpu env restore` calls `export.py`. `cache/` manages the units that a
node has fetched.
"""
