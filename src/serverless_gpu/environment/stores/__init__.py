"""Stores for units, packs and snapshots: a directory, memory, an object store, or a server.

`base.py` defines the store interface, `store_urls.py` opens stores, and `blobs.py` reads and writes their documents.
"""
