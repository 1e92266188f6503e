"""HTTP bodies of clients, nodes and the server, with one module per noun, and the client connection.

`base.py` defines limits and protocol versions. `http_client.py` implements retries, and `connection.py` the connection.
"""
