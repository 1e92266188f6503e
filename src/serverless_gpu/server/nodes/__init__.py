"""The API of nodes: joining, orders, drains, calendars, quarantines and capacity.

The uplink of a node calls `agent_service.py`. Operators call `node_service.py`.
"""
