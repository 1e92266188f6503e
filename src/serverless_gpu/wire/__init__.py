"""HTTP bodies of client, node and server, a module per noun, and the connection that the first two use.

`base.py` has limits and versions of the protocol, `http_client.py` the retries, `connection.py` the connection.
"""
