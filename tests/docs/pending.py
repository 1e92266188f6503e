"""What the pages describe already and this tree does not have yet; must be empty when a version is made.

A block of code or a command that contains one of these is not run.
"""

from __future__ import annotations

PENDING: tuple[str, ...] = ()


def pending(text: str) -> str:
    """Return the missing thing that a text needs, "" when it needs none."""
    return next((needed for needed in PENDING if needed in text), "")
