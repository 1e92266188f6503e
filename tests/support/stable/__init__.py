"""Helpers that tests of stable share."""
