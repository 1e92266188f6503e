"""The agent: one process per home that keeps zygotes and environments warm and starts supervisors.

Clients connect to the agent through `connection.py`. The event loop of the agent is in `agent.py`.
"""
