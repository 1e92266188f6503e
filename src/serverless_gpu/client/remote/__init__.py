"""Runs calls with `remote=True` through a server.

The client imports this package at the first remote call, because the import of the HTTP library takes 50 ms.
"""
