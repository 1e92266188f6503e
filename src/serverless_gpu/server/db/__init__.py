"""Manages the database: connections, group commit, leader lock, disk reserve, tables, migrations.

The `records` package contains the SQL statements for `tables.py`. Services call `Transactions` (`database.py`).
"""
