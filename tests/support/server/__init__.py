"""Helpers that tests of server share."""
