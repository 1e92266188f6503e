"""Defines the HTTP bodies between clients, nodes and the server, and the client connection.

`base.py` defines limits and protocol versions. `http_client.py` implements retries, and `connection.py` the connection.
"""
