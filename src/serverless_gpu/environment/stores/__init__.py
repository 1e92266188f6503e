"""Where units, packs and snapshots lie: a directory, memory, an object store, or a server.

`base.py` says what every store does, `store_urls.py` opens one, `blobs.py` reads and writes documents in it.
"""
