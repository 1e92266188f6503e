"""The agent: one process per home that keeps zygotes and environments warm and starts supervisors.

The client connects to the agent through `connection.py`. To read the code, start with `agent.py`.
"""
