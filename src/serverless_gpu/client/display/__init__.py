"""Displays a run on a terminal, in a notebook, in a file or in a pipe. Start with `run_display.py`."""
