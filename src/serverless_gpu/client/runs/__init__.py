"""Implements run handles, futures of runs, run lists and attaching to runs. Start with `run.py`."""
