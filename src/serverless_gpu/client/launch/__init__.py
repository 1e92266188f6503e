"""From a function and its arguments to a launched run: checks, call, environment. Start with `launch.py`."""
