"""Stores rank output, payload parts and captured environments in a directory or a bucket.

The services for reports, submissions and streams use this package. Begin reading this package at `server_stores.py`,
which opens all stores.
"""
