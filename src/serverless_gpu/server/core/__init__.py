"""Shared foundations of the server: settings, hub, loops, keys, health, metrics, validation.

This package imports no table and no route. Start with `settings.py` and `hub.py`.
"""
