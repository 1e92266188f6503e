"""From a function and its arguments to a launched run: checks, the call's file, the environment.

The decorator calls `launch.py`, which refuses bad input (`preflight.py`) before anything starts.
"""
