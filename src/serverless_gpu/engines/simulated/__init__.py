"""The simulated engine: a cluster without machines, on a clock that a test moves.

Tests, the simulation and benchmarks use it. Start with `simulated_engine.py`.
"""
