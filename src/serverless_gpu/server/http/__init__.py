"""Serves HTTP: listener, TLS, middleware, authentication, and declarations of routes.

`composition.py` puts the routes of all packages behind `auth_middleware.py`. Start reading with `routing.py`.
"""
