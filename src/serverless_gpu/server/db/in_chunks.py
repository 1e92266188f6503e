"""Long lists of values for ``IN (…)``, portion by portion: a statement takes so many values, and its text no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
AT_ONCE = 500


def portions(values: Sequence[T], size: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """Yield values in their order, so many at a time."""
    return (values[start : start + size] for start in range(0, len(values), size))
