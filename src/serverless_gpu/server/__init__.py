"""Control plane for runs, nodes, budgets and the audit.

The server runs no user code and never unpickles data. Each package may import only later packages in this list, as
`import-linter` checks:

    process, startup, composition, runs and invariants, scheduling, budgets, billing, policies, pools, operations,
    nodes, identity, lifecycle, environments, storage, secrets, audit, http, records, db, core

A module that must affect an earlier package in the list receives a callable. Each module defines its routes after the
service class, and `composition.py` lists all routes. Start reading with `composition.py`, which builds all services.
"""
