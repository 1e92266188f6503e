"""Shared foundations of the server: settings, hub, loops, keys, health, metrics, validation.

This package imports no database tables and no routes. Start reading with `settings.py` and `hub.py`.
"""
