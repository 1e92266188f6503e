"""Captures an environment: packs the files of units into a store.

The environment service and `sgpu env capture` call `snapshot_capture.py`. `packer.py` reads, compresses and stores the
files.
"""
