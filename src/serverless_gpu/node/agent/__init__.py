"""The agent: one process per home that keeps zygotes and environments warm and starts supervisors.

The client connects to it through `connection.py`. Start with `agent.py`.
"""
