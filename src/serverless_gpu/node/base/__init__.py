"""Shared by all parts of a node: the home, configuration, locks, protocol messages, disk reserve.

It starts no process. Start with `home.py`, which names every file of a home.
"""
