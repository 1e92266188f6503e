"""HTTP: listener, TLS, middleware, authentication, and how routes are written.

`composition.py` puts the routes of all packages behind `auth_middleware.py`. Start with `routing.py`.
"""
