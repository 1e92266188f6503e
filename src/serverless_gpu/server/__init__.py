"""The server: a control plane for runs, nodes, budgets and the audit.

The server runs no user code and never unpickles data. Imports point only down this list (`import-linter`):

    process, startup, composition, runs and invariants, scheduling, budgets, billing, policies, pools, operations,
    nodes, identity, lifecycle, environments, storage, secrets, audit, http, records, db, core

A module that must affect a higher module receives a callable. Each module defines its routes below their service
(`composition.py` lists the routes). Start reading with `composition.py`, which builds all services.
"""
