"""Pure values and decisions: what a GPU, a run, a placement and a charge are, and what follows from them.

Values are frozen, keyword-only msgspec Structs, checked when they are made. Nothing in this package reads a clock, the
environment, a file, the network or a database; callers pass those in as values.
"""
