"""Contains the package version as a literal, because reading the package metadata takes 40 ms."""

from __future__ import annotations

__version__ = "0.1.0"
