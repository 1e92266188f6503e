"""Captures an environment by packing its files into a store.

The environment service and `sgpu env capture` call `snapshot_capture.py`. `packer.py` reads, compresses and stores the
files.
"""
