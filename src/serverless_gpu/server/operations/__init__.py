"""Operating a server: backup, restore, key rotation, systemd, sidecars, status and metrics.

`sgpu server` and the start of the process call it. Start with `backup.py`.
"""
