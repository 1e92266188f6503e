"""Access: roles, usage policies, teams, the audit chain and which process may speak as a node.

The server's identity, policies and audit packages call it. Start with `roles.py`.
"""
