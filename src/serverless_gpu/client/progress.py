"""What one rank writes to one stream, as whole lines and the progress line that is being redrawn.

    "loss 1\\n\\r 10%\\r 20%"   ─▶  lines: "loss 1"   progress: " 20%"
    "…\\r100%\\n"               ─▶  lines: "100%"     progress: ""

A progress bar redraws its line after a carriage return; nested bars also move the cursor up again. So a line counts as
written when the cursor has left it for good: at once in a stream whose cursor never moves up, else when nothing has
come for a while or a few lines wait.

Failure cases: a line without end (cut at a bound), bars nested deeper than the bound (their redrawn lines are printed).
"""

from __future__ import annotations

import re

_LINE_CHARACTERS_MAX = 1 << 16
_ROWS_MAX = 8
_TOKENS = re.compile(r"(\r|\n|\x1b\[\d*A)")
_CUT_TOKEN = re.compile(r"\x1b(\[\d*)?\Z")


class RankText:
    """The text of one stream of one rank."""

    def __init__(self) -> None:
        self._rows = [""]
        self._row = 0
        self._replace = False  # the next text stands in for what the row shows
        self._redrawn = False
        self._moves_up = False
        self._quiet = False
        self._cut = ""

    @property
    def progress(self) -> str:
        """Return what is being redrawn now, or ""."""
        if not self._redrawn:
            return ""
        return "  ".join(row.strip() for row in self._rows if row.strip())

    def feed(self, text: str) -> list[str]:
        """Take text in pieces of any size; return the lines that are whole now."""
        text = self._cut + text
        cut = _CUT_TOKEN.search(text)
        self._cut = cut[0] if cut else ""
        self._quiet = False
        for token in _TOKENS.split(text[: cut.start()] if cut else text):
            self._take(token)
        if not self._moves_up:
            return self._settled()
        return self._settled() if len(self._rows) > _ROWS_MAX else []

    def settle(self) -> list[str]:
        """Return lines that the cursor has left and did not come back to since the last call."""
        if not self._quiet:
            self._quiet = True
            return []
        return self._settled()

    def finish(self) -> list[str]:
        """Return everything that is left, a line without its newline too."""
        self._row = len(self._rows) - 1
        lines, last = self._settled(), self._rows[-1]
        if last.strip() or (last and not self._redrawn):
            lines.append(last)
        self._rows, self._row, self._redrawn = [""], 0, False
        return lines

    def _take(self, token: str) -> None:
        if token == "\r":
            self._replace = self._redrawn = True
        elif token == "\n":
            self._row += 1
            self._redrawn = self._redrawn and self._moves_up
            self._replace = self._row < len(self._rows)
            if not self._replace:
                self._rows.append("")
        elif token.startswith("\x1b[") and token.endswith("A"):
            self._moves_up = self._replace = True
            self._row = max(0, self._row - int(token[2:-1] or 1))
        elif token:
            self._write(token)

    def _write(self, text: str) -> None:
        shown = "" if self._replace else self._rows[self._row]
        self._replace = False
        whole = shown + text
        while len(whole) > _LINE_CHARACTERS_MAX:
            self._rows.insert(self._row, whole[:_LINE_CHARACTERS_MAX])
            self._row, whole = self._row + 1, whole[_LINE_CHARACTERS_MAX:]
        self._rows[self._row] = whole

    def _settled(self) -> list[str]:
        lines, self._rows = self._rows[: self._row], self._rows[self._row :]
        self._row = 0
        if lines and self._rows == [""]:
            self._redrawn = False
        return lines
