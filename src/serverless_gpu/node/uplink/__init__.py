"""The uplink makes this machine a node of a server: a local client that executes the server's orders.

To read the code, start with `process.py`. `attempt_controller.py` controls one attempt, `reporter.py` reports the
attempt and `delivery.py` sends its files. `presence.py` describes the node. `server.py` manages the connections to the
server.
"""
