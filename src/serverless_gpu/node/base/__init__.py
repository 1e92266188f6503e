"""Shared by all parts of a node: the home, configuration, lock files, protocol messages, network, requirements.

It starts no process. Start with `home.py`, which names every file of a home.
"""
