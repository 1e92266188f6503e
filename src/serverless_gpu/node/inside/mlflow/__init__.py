"""Connects MLflow in a rank to the job's run, with the standard library only.

A rank installs `hook.py` before user code runs.
"""
