"""From files to packs in a store."""
