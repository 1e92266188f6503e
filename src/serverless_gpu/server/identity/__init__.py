"""Manages principals, teams and tokens, and decides which principals share a uid.

Start reading with `principal_service.py`.
"""
