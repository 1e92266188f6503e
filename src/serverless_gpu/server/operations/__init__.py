"""Operating a server: backup, restore, key rotation, rollback detection, systemd, sidecars, state metrics.

`sgpu server` and the start of the process call it. Start with `backup.py`.
"""
