"""The audit as a chain: each entry has a number without gaps and a digest of itself and of the one before.

    sha256(entry n) = SHA-256( sha256(entry n-1) ␤ canonical JSON of entry n ),   sha256(entry 0) = 64 zeros

To change, remove or insert an entry is to change the digest of every later one, and a reader who has kept a copy of
any later digest (`sgpu audit export`) sees it. The chain alone proves nothing about its end: entries that were cut off
there are missed only by those who have a copy of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

GENESIS = "0" * 64
"""What the first entry follows."""


class ChainedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the audit, in its place.

    Attributes:
        number: 1, 2, 3 … without gaps.
        seq: its number in the database, which may have gaps.
        at_ns: nanoseconds since 1970.
        principal: who did it; "server" for the server itself.
        action: what, for example ``"run.create"``.
        subject: to what: an identifier or a name.
        detail: never a secret, never the value of a variable.
        token: identifier of the token that was used, or "".
        sha256: digest of all of this and of the entry before.
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
    """Return the digest that an entry has to have."""
    said = (link.number, link.seq, link.at_ns, link.principal, link.action, link.subject, link.detail, link.token)
    return hashlib.sha256(previous.encode() + b"\n" + msgspec.json.encode(said, order="sorted")).hexdigest()


def follow(links: Iterable[ChainedEntry], *, after: ChainHead) -> tuple[ChainHead, str]:
    """Follow a chain from a known head on, as far as it is whole.

    Returns the last intact entry, and the defect of the next one or "".
    """
    head = after
    for link in links:
        if link.number != head.number + 1:
            return head, f"entry {head.number + 1} is missing: entry {link.number} follows entry {head.number}"
        if link.sha256 != digest(head.sha256, link):
            return head, f"entry {link.number} is not what was written down, or the one before it is not"
        head = ChainHead(link.number, link.sha256)
    return head, ""
