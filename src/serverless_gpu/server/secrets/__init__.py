"""Secrets of principals: set, listed, deleted, sealed at rest.

Routes and submission call `secret_service.py`.
"""
