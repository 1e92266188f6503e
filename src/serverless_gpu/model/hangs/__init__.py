"""Hang and idle detection: stacks, what ranks last did, the verdict for one node or a whole gang, and the report.

The supervisor's watchdogs and the server's gang hang service call it. Start with `hang_detection.py`.
"""
