"""The API of runs for clients: submission, estimates, streams, views, stop requests, queue, retention.

Clients call the routes in `run_service.py`, `estimates.py` and `queue_views.py`. `submission.py` makes a run durable.
Start reading with `submission.py`.
"""
