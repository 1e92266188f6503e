"""Captured environments: their routes and the garbage collection of a store.

The store itself is `storage/environment_store.py`. Start with `garbage_collection.py`.
"""
