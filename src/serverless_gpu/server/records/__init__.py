"""Repositories: SQL and row values, a module per noun: runs, attempts, crews, nodes, charges, principals and so on.

Every function takes a connection; services call them in their transactions. Start with `runs.py`.
"""
