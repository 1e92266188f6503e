"""The rows at the bottom of a terminal that are redrawn in place, and writing to a stream that may not take it.

    printed lines, final
    [rank 0]  45%|████▌     |        ◀─ the block: erased before anything is printed, drawn again after it
    [rank 3] loading …

A missing or closed stream and a pipe without a reader show nothing, since the run matters more. A full disk does the
same with a notice. A stream that cannot encode a character gets it escaped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TextIO

from serverless_gpu.client.display.terminal import fit

LIVE_ROWS_MAX = 8
_COLUMNS = 80  # where the terminal does not say


class LiveBlock:
    """The rows that are on the terminal now."""

    def __init__(self) -> None:
        self._target: TextIO | None = None
        self._rows = 0

    @property
    def there(self) -> bool:
        """Return whether there are rows on the screen."""
        return self._rows > 0

    def draw(self, target: TextIO, lines: Sequence[str]) -> None:
        """Replace the rows with `safe` lines, cut to the terminal's size."""
        columns, height = _size(target)
        lines = lines[: max(1, height - 1)]
        if not lines:
            self.erase()
            return
        text = self._to_top() + "\r\n".join(fit(line, columns - 1) + "\x1b[K" for line in lines)
        write(target, text + ("\x1b[J" if len(lines) < self._rows else ""))
        self._target, self._rows = target, len(lines)

    def erase(self) -> None:
        """Take the rows away, so that something can be printed."""
        if self._rows:
            write(self._target, self._to_top() + "\x1b[J")
            self._rows = 0

    def _to_top(self) -> str:
        return "\r" + (f"\x1b[{self._rows - 1}A" if self._rows > 1 else "")


def is_terminal(target: TextIO | None) -> bool:
    """Return whether a stream is a terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return target is not None and target.isatty()
    return False


def live_target(stdout: TextIO | None, stderr: TextIO | None) -> TextIO | None:
    """Return the terminal for redrawn rows, or None."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    return next((target for target in (stderr, stdout) if is_terminal(target)), None)


def columns_of(target: TextIO) -> int:
    """Return how many columns a terminal has."""
    return _size(target)[0]


def write(target: TextIO | None, text: str) -> str:
    """Write and flush; return why that failed if the user would miss the text, or ""."""
    if target is None:
        return ""
    try:
        try:
            target.write(text)
        except UnicodeEncodeError:
            encoding = target.encoding or "ascii"
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
        target.flush()
    except (BrokenPipeError, ValueError):  # the reader has gone, or closed it
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _size(target: TextIO) -> tuple[int, int]:
    try:
        columns, height = os.get_terminal_size(target.fileno())
    except (OSError, ValueError):
        return _COLUMNS, LIVE_ROWS_MAX + 1
    return columns or _COLUMNS, height or LIVE_ROWS_MAX + 1
