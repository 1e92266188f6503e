"""Captures and restores Python environments as content-addressed units.

`scan/` finds installed files, and `capture/` packs the files into a store. `restore/` assembles a tree of the files on
a node. `stores/` contains the store implementations. `service.py` captures an environment for a calling process.
`documents.py`, the best module to read first, defines the data types. `snapshot_validation.py` validates documents from
other machines.
"""
