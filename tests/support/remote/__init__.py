"""Helpers that tests of remote share."""
