"""Nodes: how agents join and receive orders, drains, calendars and quarantines, capacity.

The uplink of a node calls `agent_service.py`. Operators call `node_service.py`.
"""
