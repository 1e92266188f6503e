"""Commands about people and access, one module per group: `user`, `token`, `policy` …. Start with `principals.py`."""
