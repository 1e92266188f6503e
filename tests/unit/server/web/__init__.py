"""Unit tests of the web pages."""
