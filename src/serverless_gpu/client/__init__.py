"""The client package: checks before a run, the run handle, and the exceptions for the caller.

Users import this package through `serverless_gpu`. To read the code, start with `decorator.py`, then
`launch/launch.py`.
"""
