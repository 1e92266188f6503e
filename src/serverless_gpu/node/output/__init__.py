"""Output of ranks on a node: log files, their tails, and live delivery to attached clients.

The supervisor writes output. Clients and the uplink read output. To read the code, start with `logs.py`.
"""
