"""Manages the database: connections, group commit, leader lock, disk reserve, tables, migrations.

The records package writes SQL on `tables.py`. Services call `Transactions` (`database.py`).
"""
