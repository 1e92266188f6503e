"""Text on a terminal: aligned columns, and what others wrote made harmless."""

from __future__ import annotations

from collections.abc import Sequence


def safe(line: str, *, tty: bool) -> str:
    """Return a line that others wrote (a rank, a name, a tag) without what would take over a terminal.

    Args:
        line: without its newline.
        tty: whether it goes to a terminal; a file or pipe gets it as it is.
    """
    if not tty:
        return line
    # Colours pass; everything else that is not printable shows as what it is.
    return "".join(letter if letter.isprintable() or letter == "\t" else repr(letter)[1:-1] for letter in line)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines whose columns are aligned; the last column is left as long as it is."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
