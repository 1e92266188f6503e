"""Helpers that tests of replay share."""
