"""Output of ranks on a node: log files, their tails, and live delivery to attached clients.

The supervisor writes; clients and the uplink read. To read the code, start with `logs.py`.
"""
