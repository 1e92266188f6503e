"""Manages the server database with connections, commits, leader lock, disk reserve and migrations.

`database.py` defines the interface `Transactions`, through which services read and write. The `records` package
contains the SQL statements.
"""
