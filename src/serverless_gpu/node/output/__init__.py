"""Rank output on a node: log files, their tails, and live delivery to attached clients.

The supervisor writes the ranks' output. Clients and the uplink read the ranks' output. Start reading the code at
`logs.py`.
"""
