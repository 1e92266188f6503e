"""The server: a queue in front of nodes, with people, money and an audit. It runs no user code and never unpickles.

Imports point down this list (`import-linter`): process, startup, composition (it wires everything), runs and
invariants, scheduling, budgets, billing, policies, pools, operations, nodes, identity, lifecycle, environments,
storage, secrets, audit, http, records, db, core. An effect that points up is a callable. The routes of a noun stand
below its service (`composition.py` lists them). Start with `composition.py`.
"""
