"""Stored bytes: output of ranks, parts of payloads, captured environments, in a directory or a bucket.

Reports, submissions and streams call it. Start with `storage.py`, which opens all stores.
"""
