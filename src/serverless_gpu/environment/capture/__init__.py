"""Captures an environment: files of units become packs in a store.

The environment service and `sgpu env capture` call `snapshot_capture.py`. Start there; `packer.py` does the work.
"""
