"""The log of the server."""

from __future__ import annotations
