"""Makes this machine a node of a server and executes the server's orders locally.

Start reading with `process.py`, which contains the uplink process. `attempt_controller.py` controls one attempt.
`reporter.py` reports the attempt's state, and `delivery.py` sends the attempt's files. `presence.py` describes the
node. `server.py` manages the connections to the server.
"""
