"""Server API for nodes: joining, orders, drains, calendars, quarantines and capacity.

A node's uplink calls the routes in `agent_service.py`. Operators call the routes in `node_service.py`.
"""
