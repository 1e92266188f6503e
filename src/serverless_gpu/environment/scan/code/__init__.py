"""The project's own code: which files of a directory travel, as git would have it.

`scan.py` calls `project.py`; the other modules hold git's rules.
"""
