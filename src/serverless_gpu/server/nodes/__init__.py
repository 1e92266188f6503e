"""Nodes: how agents join and get orders, drains, calendars and quarantines, capacity.

The uplink of a node calls `agent_service.py`; operators use `node_service.py`. `node_routes.py` has the routes of both.
"""
