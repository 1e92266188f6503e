"""The API of nodes: joining, orders, drains, calendars, quarantines and capacity.

The uplink of a node calls the routes in `agent_service.py`. Operators call the routes in `node_service.py`.
"""
