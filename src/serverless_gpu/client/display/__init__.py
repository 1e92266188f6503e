"""Displays of a run on a terminal, in a file or in a pipe. Start with `run_display.py`."""
