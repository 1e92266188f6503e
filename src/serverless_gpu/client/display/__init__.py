"""Displays of a run on a terminal, in a file or in a pipe.

A run's `follow` writes to a display; notebooks have their own in `client/notebook`. Start with `run_display.py`.
"""
