"""MLflow in a rank: what user code logs lands in the job's run. Standard library only.

A rank installs `hook.py` before user code runs.
"""
