"""How far a capture or a restore is, for display."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Phase = Literal["scan", "capture", "fetch", "restore", "compile", "collect"]


class ProgressPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point on the way."""

    phase: Phase
    bytes_done: int = 0  # content bytes dealt with so far
    bytes_total: int = 0  # of how many; 0 while not known
    files_done: int = 0
    files_total: int = 0  # of how many; 0 while not known
    moved_bytes: int = 0  # bytes that really went to or came from the store, compressed
    name: str = ""  # what is being dealt with, for example ``torch 2.13.0``, or ""
    waits_for: str = ""  # what another process brings, and is waited for, or ""


Report = Callable[[ProgressPoint], None]


def ignore_progress(progress: ProgressPoint) -> None:
    """Take a report and ignore it."""
