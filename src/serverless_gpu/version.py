"""The version of this package as a literal, because reading the installed metadata takes 40 ms."""

from __future__ import annotations

__version__ = "0.1.0"
