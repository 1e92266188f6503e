"""Sessions that this process holds open: a run of its own that waits for one of them would wait for ever."""

from __future__ import annotations

own_sessions: set[str] = set()
"""Identifiers of those that are open now."""


def advised(sentence: str) -> str:
    """Return the reason of a wait, with advice for a caller that blocks itself."""
    if any(f"session {session} " in sentence for session in own_sessions):
        return f"{sentence}; that session is open in this process: call session.distributed(...), or close it"
    return sentence
