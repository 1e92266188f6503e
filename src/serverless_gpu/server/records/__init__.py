"""Repositories: SQL and row values, with one module per noun, such as runs, attempts, crews and nodes.

Every function takes a connection. Services call the functions in their transactions. Start with `runs.py`.
"""
