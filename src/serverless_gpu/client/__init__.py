"""The caller's side: checks before a run, the run itself, and exceptions as the caller sees them.

Users reach it through `serverless_gpu`, and `cli` calls it. Start with `decorator.py`, then `launch/launch.py`.
"""
