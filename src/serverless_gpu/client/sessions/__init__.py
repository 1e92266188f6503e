"""Sessions: devices and warm processes that are held between calls, and actors that live in them.

Users open one with `serverless_gpu.session`. Start with `session.py`.
"""
