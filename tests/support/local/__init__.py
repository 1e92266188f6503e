"""Helpers that tests of local share."""
