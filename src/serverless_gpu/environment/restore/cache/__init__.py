"""The cache of units on a node: fetches, unpacks, verifies, locks and evicts units.

Restore and garbage collection call `unit_cache.py`. Failure cases: `unit_integrity.py` detects a unit that was changed
on the disk by its seal, and the cache fetches the unit again. `eviction.py` frees space on a full disk.
"""
