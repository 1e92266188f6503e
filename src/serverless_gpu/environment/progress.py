"""How far a capture or a restore is, for whoever wants to show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Phase = Literal["scan", "capture", "fetch", "restore", "compile", "collect"]


class ProgressPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point on the way.

    Attributes:
        phase: what is being done.
        bytes_done: content bytes dealt with so far.
        bytes_total: of how many; 0 while not known.
        files_done: files dealt with so far.
        files_total: of how many; 0 while not known.
        moved_bytes: bytes that really went to or came from the store, compressed.
        name: what is being dealt with, for example ``torch 2.13.0``, or "".
        waits_for: what somebody else brings, and is waited for, or "".
    """

    phase: Phase
    bytes_done: int = 0
    bytes_total: int = 0
    files_done: int = 0
    files_total: int = 0
    moved_bytes: int = 0
    name: str = ""
    waits_for: str = ""


Report = Callable[[ProgressPoint], None]


def nobody(progress: ProgressPoint) -> None:
    """Take a report and show it to nobody."""
