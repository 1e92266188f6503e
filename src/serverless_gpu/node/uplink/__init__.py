"""The uplink: makes this machine a node of a server. A local client that acts for the server.

Start with `process.py`. `attempt_controller.py` looks after one attempt, `reporter.py` reports it, `delivery.py` sends
its files, `presence.py` describes the node, `server.py` is the connection.
"""
