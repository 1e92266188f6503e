"""Scans an environment: which roots, distributions and project files there are, and whether any of it has changed.

The environment service and `sgpu env` call `scan.py`, which says what each step costs. Start there. `project_files.py`
decides which files of the user's project travel.
"""
