"""Turns a function and its arguments into a launched run. Start with `launch.py`."""
