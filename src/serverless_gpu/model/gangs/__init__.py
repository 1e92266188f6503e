"""Gangs on several nodes: crews, how they meet, the gang's life as the sum of theirs, one receipt.

The supervisor and the server's lifecycle package call it. Start with `gang_lifecycle.py`.
"""
