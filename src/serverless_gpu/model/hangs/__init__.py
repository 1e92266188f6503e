"""Hang and idle detection: stacks, inspections of ranks, verdicts for a node or a gang, and reports.

The supervisor's watchdogs and the server's gang hang service use this package. Start with `hang_detection.py`.
"""
