"""Nodes: how agents join and get orders, drains, calendars and quarantines, capacity.

The uplink of a node calls `agent_service.py`; operators call `node_service.py`.
"""
