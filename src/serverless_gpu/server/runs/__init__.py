"""Client API for runs: submission, estimates, streams, views, stop requests, queue, retention.

Clients call the routes in `run_service.py`, `estimates.py` and `queue_views.py`. `submission.py` stores each new run
durably. Begin reading this package at `submission.py`.
"""
