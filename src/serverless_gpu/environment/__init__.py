"""Captured environments: everything that a Python process can import, as content-addressed units.

`scan/` finds installed files, `capture/` sends the files to a store, `restore/` makes a tree of them on a node, and
`stores/` contains the stores. `service.py` captures an environment for a calling process. `documents.py` defines the
values, and `snapshot_validation.py` checks values from other machines. Start with `documents.py`.
"""
