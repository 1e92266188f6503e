"""Read-only proxy for package indexes: the only way out of the network for environment builds.

`process.py` runs the proxy on its own address and port. Administrators define indexes with `sgpu index`. Start reading
in `application.py` (a request) or `index_service.py` (definitions and tokens). Decision 0046 has the reasons.
"""
