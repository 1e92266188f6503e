"""Commands about people and their rights: users, teams, tokens, secrets, usage policies and the audit log."""
