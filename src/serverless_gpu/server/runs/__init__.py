"""Runs for callers: submission, estimates, streams, views, stop requests, the queue, retention.

Clients call the routes; `submission.py` makes a run durable. Start there.
"""
