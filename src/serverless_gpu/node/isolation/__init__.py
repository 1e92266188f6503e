"""Isolation of processes: cgroups, and who owns the other end of a socket.

The agent and the supervisor call it. Start with `cgroups.py`.
"""
