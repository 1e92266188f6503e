"""Serves HTTP with listener, TLS, middleware, authentication and route declarations.

`composition.py` puts the routes of all packages behind `auth_middleware.py`. Start reading with `routing.py`.
"""
