"""Splits a sorted list that an API route returns as a whole into pages with cursors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
ROWS = 100


class ListPage(NamedTuple, Generic[T]):
    """Rows of one page, the key of its last row ("" on the last page), and the length of the whole list."""

    rows: list[T]
    cursor: str
    total: int


def page_of(items: Sequence[T], key: Callable[[T], str], after: str, *, rows: int = ROWS) -> ListPage[T]:
    """Return the page after the row with a key, or the first page if that row has disappeared."""
    keys = [key(item) for item in items]
    first = keys.index(after) + 1 if after in keys else 0
    shown = list(items[first : first + rows])
    return ListPage(shown, key(shown[-1]) if shown and first + rows < len(items) else "", len(items))
