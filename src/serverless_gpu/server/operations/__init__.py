"""Operates a server: backup, restore, key rotation, systemd, sidecars, status and metrics.

`sgpu server` and the start of the process use this package. Start reading with `backup.py`.
"""
