"""SQL queries and row types of the database, with one module per table.

Every query function takes a database connection. Services call the query functions in their own transactions. Start
reading with `runs.py`.
"""
