"""Client package with pre-run checks, run handles and client-side exceptions.

Users import the public names from `serverless_gpu`. Developers should start reading with `decorator.py` and
`launch/launch.py`.
"""
