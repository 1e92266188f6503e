"""Where units, packs and snapshots lie: a directory, memory, or an object store."""
