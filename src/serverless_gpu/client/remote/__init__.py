"""Runs calls with `remote=True` through a server.

The first remote call loads this package, because loading the HTTP library takes 50 ms.
"""
