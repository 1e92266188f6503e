"""Pools and shares: their routes and service.

Start with `pool_service.py`.
"""
