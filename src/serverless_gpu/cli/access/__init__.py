"""Commands for users, teams, tokens, secrets, usage policies and the audit log."""
