"""The audit: who did what, in the order it was written down.

    GET    /audit?after=&limit=&principal=&action=&subject=&newest=   → AuditPage

`after` is the number of the last entry one has. Entries are numbered and chained within a second or so after the
request that they tell of was answered (`model/access/audit_chain.py`).
"""

from __future__ import annotations

from serverless_gpu.model.access.audit_chain import ChainedEntry
from serverless_gpu.wire.base import Answer


class AuditPage(Answer, frozen=True, kw_only=True):
    """Some entries.

    Attributes:
        entries: in the order of their numbers.
        last: number of the last entry there is.
        pending: entries that are written down and not in the chain yet.
        pending_since_ns: when the oldest of those was written, nanoseconds since 1970; None when there is none.
        now_ns: the server's time.
    """

    entries: tuple[ChainedEntry, ...]
    last: int
    pending: int
    pending_since_ns: int | None
    now_ns: int
