"""Shared modules of a node: home, configuration, lock files, protocol messages, network, requirements.

To read the code, start with `home.py`, which lists every file of a home directory.
"""
