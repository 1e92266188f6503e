"""What every part of the server uses: settings, the hub, loops, keys, health, metrics, validation.

It knows no table and no route. Start with `settings.py` and `hub.py`.
"""
