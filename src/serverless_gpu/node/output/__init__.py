"""Output of ranks on a node: log files, their tail, live delivery to watchers.

The supervisor writes, clients and the uplink read. Start with `logs.py`.
"""
