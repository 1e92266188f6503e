"""Repositories: SQL and row values, with one module per table, for example runs, attempts and nodes.

Every function takes a connection. Services call these functions in their own transactions. Start reading with
`runs.py`.
"""
