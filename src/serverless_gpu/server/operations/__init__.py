"""Operates a server: backup, restore, key rotation, systemd, sidecars, status and metrics.

The command `sgpu server` and the start of the server process use this package. Start reading with `backup.py`.
"""
