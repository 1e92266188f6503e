"""HTTP bodies of clients, nodes and the server, with one module per noun, and the client connection.

`base.py` has limits and versions of the protocol, `http_client.py` the retries, `connection.py` the connection.
"""
