"""The stores for units, packs and snapshots: a directory, memory, an object store, or a server.

`base.py` defines the interface of a store, `store_urls.py` opens a store, and `blobs.py` reads and writes the documents
of a store.
"""
