"""The database: connections, group commit, the leader lock, the disk reserve, tables and migrations.

The records package writes SQL on `tables.py`; services call `Transactions` (`database.py`).
"""
