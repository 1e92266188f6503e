"""Follows the chain of the audit (`model/access/audit_chain.py`) while the server works, page by page.

    from entry 1 ─▶ page ─▶ page ─▶ … ─▶ the end, and on with what is new ─▶ `begin_again` ─▶ from entry 1
                                          └ remembered: the last entry that there was, and its digest

What was remembered is held against the next time: a chain that is whole, and another one, was written anew; one that
ends before, was cut off. A server that was just started remembers nothing: that is what copies are for
(`sgpu audit export`).

Failure cases: an entry is wrong or missing (said; it goes on behind it, so that one wrong entry hides no other); the
database is away (the caller's to hear; the place is kept).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.access.audit_chain import ChainedEntry, ChainHead, follow
from serverless_gpu.server.records import audit
from serverless_gpu.server.records.audit import AuditFilter

PAGE_LINKS = 1_000
Broken = tuple[int, str]
"""The number of an entry, and what is wrong there."""
Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""`Database.read`."""


class ChainCheck:
    """Follows the chain.

    Attributes:
        done: whether all that there was has been followed.
    """

    def __init__(self) -> None:
        self._at = self._last = ChainHead()
        self.done = False

    def begin_again(self) -> None:
        """Follow it from its first entry on."""
        self._at, self.done = ChainHead(), False

    def look(self, read: Read, *, limit: int = PAGE_LINKS) -> list[Broken]:
        """Follow the next page; return what is wrong with it.

        Args:
            read: reads the database.
            limit: entries of a page.
        """
        try:
            page: list[ChainedEntry] = read(
                partial(audit.links, wanted=AuditFilter(after=self._at.number, limit=limit))
            )
        except msgspec.MsgspecError as error:
            self.done = True
            return [(self._at.number + 1, f"it, or one of the {limit - 1} behind it, cannot be read: {error}")]
        wrong = self._followed(page)
        self.done = len(page) < limit
        if self.done and self._at.number < self._last.number:
            wrong.append(
                (self._last.number, f"the audit went as far as this, and now ends with entry {self._at.number}")
            )
            self._last = self._at
        return wrong

    def _followed(self, page: list[ChainedEntry]) -> list[Broken]:
        wrong: list[Broken] = []
        while page:
            head, problem = follow(page, after=self._at)
            whole = head.number - self._at.number
            self._remember(page[:whole], wrong)
            self._at, page = head, page[whole:]
            if problem:
                wrong.append((page[0].number, problem))
                self._at, page = ChainHead(page[0].number, page[0].sha256), page[1:]
        return wrong

    def _remember(self, whole: list[ChainedEntry], wrong: list[Broken]) -> None:
        for link in whole:
            if link.number == self._last.number and link.sha256 != self._last.sha256:
                wrong.append((link.number, "it is another one than before, or one before it is"))
            if link.number >= self._last.number:
                self._last = ChainHead(link.number, link.sha256)
