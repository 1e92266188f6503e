"""Captured environments: what a Python process can import, as content-addressed units.

`scan/` finds what is installed, `capture/` sends it to a store, `restore/` makes a tree of it on a node, `stores/` hold
it. `service.py` captures for a calling process. Values are in `documents.py`; `snapshot_rules.py` checks those
that come from somewhere else. Start with `documents.py`.
"""
