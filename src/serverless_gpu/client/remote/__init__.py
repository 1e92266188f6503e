"""Runs calls with `remote=True` through a server.

The first remote call loads this package, because loading HTTP takes 50 ms.
"""
