"""Defines the HTTP bodies between clients, nodes and server, and the client's connection.

`base.py` defines limits and protocol versions. `http_client.py` implements retries, and `connection.py` implements
connections.
"""
