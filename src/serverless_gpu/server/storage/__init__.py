"""Stores bytes in a directory or a bucket: output of ranks, parts of payloads, captured environments.

Reports, submissions and streams use this package. Start reading with `server_stores.py`, which opens all stores.
"""
