"""Caches units on a node: fetches, unpacks, verifies, locks and evicts units.

Restore and garbage collection call `unit_cache.py`. Failure cases: If a unit's seal shows a modification on disk
(`unit_integrity.py`), the cache fetches the unit again. If the disk is full, `eviction.py` removes units.
"""
