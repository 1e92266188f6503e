"""Helpers that tests of crash share."""
