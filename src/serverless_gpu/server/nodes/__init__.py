"""Nodes: how agents join and get orders, drain, evacuation, rules of people, capacity.

The uplink of a node talks to `agent_service.py`; operators use `node_admin.py`. Start with `agent_service.py`.
"""
