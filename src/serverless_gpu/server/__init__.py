"""The server, a control plane for runs, nodes, budgets and the audit.

The server runs no user code and never unpickles. Imports point only down this list (`import-linter`):

    process, startup, composition, runs and invariants, scheduling, budgets, billing, policies, pools, operations,
    nodes, identity, lifecycle, environments, storage, secrets, audit, http, records, db, core

A module that must affect a higher module takes a callable. Routes stand below their service in the same module
(`composition.py` lists them). Start with `composition.py`, which wires all services.
"""
