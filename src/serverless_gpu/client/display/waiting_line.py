"""Messages about a wait in the queue: redrawn rows on a terminal, else lines at growing intervals. Pure.

In a queue of thousands the place changes every few seconds. A row is replaced by the next one; elsewhere the first
sentence is a line at once, and later ones come ever more rarely, in the end every five minutes.
"""

from __future__ import annotations

import textwrap

ROWS_MAX = 4
_SAID_FIRST_S, _SAID_LAST_S = 10.0, 300.0
_WORTH_SAYING_S = 5.0


def waited_text(seconds: float) -> str:
    """Return a wait in words that do not change often: ``"12 s"``, ``"2 h 5 min"``."""
    minutes = int(seconds // 60)
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


class WaitingLine:
    """Messages about one run's wait; all times are boottime."""

    def __init__(self) -> None:
        self.sentence = ""
        self._since_ns = 0
        self._said = ""
        self._said_ns: int | None = None
        self._pause_s = _SAID_FIRST_S

    def tell(self, sentence: str, *, since_ns: int) -> None:
        """Take a sentence and the start of the wait."""
        self.sentence, self._since_ns = sentence, since_ns

    def over(self, now_ns: int) -> str:
        """Take that the wait is over; return how long it was, where that is worth a word."""
        was, self.sentence = self.sentence, ""
        waited_s = (now_ns - self._since_ns) / 1e9
        return waited_text(waited_s) if was and waited_s >= _WORTH_SAYING_S else ""

    def waited(self, now_ns: int) -> str:
        """Return how long it is waited by now, in words."""
        return waited_text((now_ns - self._since_ns) / 1e9)

    def due_s(self, now_ns: int) -> float | None:
        """Return the seconds until the next line, or None without one."""
        if not self.sentence or self.sentence == self._said:
            return None
        return 0.0 if self._said_ns is None else max(0.0, self._pause_s - (now_ns - self._said_ns) / 1e9)

    def line(self, now_ns: int) -> str:
        """Return the sentence if it is due as a line, else ""; it counts as printed."""
        if self.due_s(now_ns) != 0.0:
            return ""
        if self._said_ns is not None:
            self._pause_s = min(2 * self._pause_s, _SAID_LAST_S)
        self._said, self._said_ns = self.sentence, now_ns
        return self.sentence

    def rows(self, now_ns: int, columns: int) -> list[str]:
        """Return the terminal rows of the wait."""
        if not self.sentence:
            return []
        text = f"serverless-gpu: queued for {self.waited(now_ns)}: {self.sentence}"
        rows = textwrap.wrap(text, max(20, columns - 1), subsequent_indent="  ", break_on_hyphens=False)
        return rows if len(rows) <= ROWS_MAX else [*rows[: ROWS_MAX - 1], f"{rows[ROWS_MAX - 1][: columns - 4]} …"]
