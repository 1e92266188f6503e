"""Principals, teams and tokens: their service and routes, first start, and pools that share a uid.

Start with `principal_service.py`.
"""
