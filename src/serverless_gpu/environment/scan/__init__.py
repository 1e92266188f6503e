"""Scans an environment for roots, distributions and project files, and detects changes.

The environment service and `sgpu env` call `scan.py`, whose docstring lists the duration of each step.
`project_files.py` selects the files of the user's project for the capture.
"""
