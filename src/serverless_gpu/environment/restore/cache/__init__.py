"""The cache of units on a node: fetches, unpacks, verifies, locks and evicts units.

Restore and garbage collection call `unit_cache.py`. Failure cases: a unit was changed on the disk, or the disk is full.
`unit_integrity.py` detects a changed unit by its seal, and the cache fetches the unit again. `eviction.py` frees space
on a full disk.
"""
