"""Principals, teams and tokens: their routes, first start, and pools that share a uid.

Start with `principal_service.py`.
"""
