"""Audit log as a hash chain: each entry's digest covers the entry and the preceding digest.

    sha256(entry n) = SHA-256( sha256(entry n-1) ␤ canonical JSON of entry n ),   sha256(entry 0) = 64 zeros

Audit entries have consecutive numbers. Changing, removing or inserting an entry changes the digest of every later
entry. A reader who exported a later digest (`sgpu audit export`) detects the change. The chain alone does not reveal
that its last entries are missing. Only a comparison with an exported copy shows missing entries at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

GENESIS = "0" * 64
"""Digest that precedes the first entry of an audit chain."""


class ChainedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the audit log, with its position in the chain.

    Attributes:
        number: 1, 2, 3 … without gaps.
        seq: row number in the database, which may have gaps.
        at_ns: nanoseconds since 1970.
        principal: the principal that acted, or "server" for the server itself.
        action: the kind of action, for example ``"run.create"``.
        subject: identifier or name of the object that the action affects.
        detail: further data, never a secret or the value of a variable.
        token: identifier of the token that the principal used, or "".
        sha256: digest of all other fields and of the preceding entry's digest.
    """

    number: int
    seq: int
    at_ns: int
    principal: str
    action: str
    subject: str
    detail: dict[str, Any]
    token: str
    sha256: str = ""


class ChainHead(msgspec.Struct, frozen=True):
    """The number and the digest of the last entry of a chain."""

    number: int = 0
    sha256: str = GENESIS


def digest(previous: str, link: ChainedEntry) -> str:
    """Return the digest that an entry must have after the preceding entry's digest."""
    said = (link.number, link.seq, link.at_ns, link.principal, link.action, link.subject, link.detail, link.token)
    return hashlib.sha256(previous.encode() + b"\n" + msgspec.json.encode(said, order="sorted")).hexdigest()


def follow(links: Iterable[ChainedEntry], *, after: ChainHead) -> tuple[ChainHead, str]:
    """Verify an audit chain from a known head up to the first defect.

    Returns the last intact entry and the defect of the next entry. The defect text is empty for an intact chain.
    """
    head = after
    for link in links:
        if link.number != head.number + 1:
            return head, f"entry {head.number + 1} is missing: entry {link.number} follows entry {head.number}"
        if link.sha256 != digest(head.sha256, link):
            return head, f"entry {link.number} or the entry before it was changed after it was written"
        head = ChainHead(link.number, link.sha256)
    return head, ""
