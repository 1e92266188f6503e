"""The client side: checks before a run, the run handle, and the exceptions that the caller receives.

Users reach this package through `serverless_gpu`, and `cli` calls it. Start with `decorator.py`, then
`launch/launch.py`.
"""
