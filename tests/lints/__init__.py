"""Tests of our own lints."""
