"""The cache of units on a node: fetched, unpacked, verified, locked, evicted.

Restore and garbage collection call `unit_cache.py`. Failure cases: a unit altered on disk is found by its seal
(`unit_integrity.py`) and fetched again; a full disk evicts first (`eviction.py`).
"""
