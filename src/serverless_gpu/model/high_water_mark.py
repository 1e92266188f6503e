"""High-water marks of a database: detect a database that was rolled back behind its last known position.

A database that stands behind its mark was rolled back: its log was lost, an old copy was put in its place, or a standby
took over that lacked the last transactions. What the server had acknowledged since is gone.
"""

from __future__ import annotations

import msgspec


class DatabasePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a database; each number only grows."""

    database_id: str  # which database; random, given once
    generation: int  # how many servers have claimed it
    commits: int  # transactions that changed something (SQLite); 0 where they are not counted
    audit: int  # number of the last row of the audit

    def __str__(self) -> str:
        commits = f"commit {self.commits:,}, " if self.commits else ""
        return f"{commits}audit row {self.audit:,}, generation {self.generation:,}"


class HighWaterMark(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a high-water mark."""

    position: DatabasePosition  # how far the database had come at least
    at_ns: int  # when that was written, nanoseconds since 1970
    place: str = ""  # where the database was, where the mark does not lie beside it; without a password


def rollback(mark: HighWaterMark | None, found: DatabasePosition | None, *, place: str = "") -> str:
    """Return how a database has less than its mark says, or "" when it has not.

    `mark` is None where nothing was written, `found` None where no server has claimed the database.
    """
    if mark is None:
        return ""
    there = mark.position
    if found is None or found.database_id != there.database_id:
        if mark.place != place:
            return ""  # the server was told to use another database
        what = "it is empty or from before it had an identity" if found is None else f"it is {found.database_id[:8]}"
        return f"this server used database {there.database_id[:8]} here, up to {there}, and {what}"
    behind = found.generation < there.generation or found.commits < there.commits or found.audit < there.audit
    return f"it ends at {found}, and this server had acknowledged {there}" if behind else ""
