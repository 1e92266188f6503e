"""A server looks at its own books: the invariants that tests hold it to, asked while it works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import sqlalchemy as sa

from serverless_gpu.server import books as book_rows
from serverless_gpu.server.books import PAGE_RUNS, Books
from serverless_gpu.server.invariants import History, Violation, violations

Read = Callable[[Callable[[sa.Connection], Books]], Books]
"""`Database.read`."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of looking at everything.

    Attributes:
        runs: how many were looked at.
        violations: what is wrong, sorted.
        skipped: what is too much to be looked at.
    """

    runs: int = 0
    violations: tuple[Violation, ...] = ()
    skipped: tuple[str, ...] = ()


def check(read: Read, *, history: History | None = None, limit: int = PAGE_RUNS) -> Checked:
    """Look at every run of a database, page by page.

    Args:
        read: reads one page.
        history: what people and nodes saw; runs that it names and that are gone are looked for by name.
        limit: runs of a page.
    """
    found: set[Violation] = set()
    skipped: list[str] = []
    seen: set[str] = set()
    for page in book_rows.pages(read, limit=limit):
        found.update(violations(page, history))
        skipped += page.skipped
        seen.update(booked.run.id for booked in page.runs)
    for gone in _portions(sorted((history or History()).acknowledged - seen), limit):
        absent = read(partial(book_rows.of_runs, run_ids=gone))
        found.update(violations(absent, history))
    return Checked(runs=len(seen), violations=tuple(sorted(found)), skipped=tuple(skipped))


def _portions(ids: Sequence[str], size: int) -> list[Sequence[str]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]
