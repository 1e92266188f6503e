"""Manages principals, teams and tokens, the first start, and pools whose runs share a uid.

Start reading with `principal_service.py`.
"""
