"""Data types and pure decision functions for GPUs, runs, placements and charges.

Values are frozen, keyword-only msgspec Structs that validate themselves on creation. Nothing in this package reads a
clock, the environment, a file, the network or a database. Callers pass all external data as arguments.
"""
