"""Commands about people and access: `login`, `user`, `team`, `token`, `policy`, `secret`, `audit`.

Each module is one command group. Start with `principals.py`.
"""
