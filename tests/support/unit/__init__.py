"""Helpers that tests of unit share."""
