"""Contains shared server components, such as settings, hub, loops, keys, health and metrics.

The `core` package imports no database tables and no routes. Start reading with `settings.py` and `hub.py`.
"""
