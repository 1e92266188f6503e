r"""Emulates a rank's terminal rows, so that a progress bar occupies a single line.

    text ──feed──▶ rows ──▶ lines that are final, to be printed
                    └─────▶ open rows: unfinished lines, active progress bars

The terminal emulation performs no I/O. A rewritten row is final after its newline, if the cursor does not move back up
to the row. For example, tqdm draws a second progress bar below the first and then moves the cursor up again. The
emulated screen therefore holds back a rewritten row briefly after its newline. A row that was never rewritten is final
at its newline. An emulated row stores only its last state. The rank's log file contains all output.

`safe` removes or escapes control sequences in a rank's output, because user code may print untrusted data. For example,
a file name may contain a sequence that changes the terminal's title or writes to the clipboard. If the output is a
terminal, `safe` handles control sequences as follows:

    colours (SGR)                              kept until the end of the line
    cursor movement and erasing, charsets      removed: programs use them to draw, for example progress bars
    OSC: titles, clipboard, links              removed; the linked text stays
    other control characters, bidi controls    escaped: \x1b, \u202e

If the output is a file or a pipe, `safe` returns the text unchanged. `safe` escapes an unfinished control sequence, so
that the next line cannot complete the sequence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

ROWS_MAX = 10
LINE_CHARACTERS_MAX = 64 << 10
HELD_S = 0.3  # Maximum seconds between a newline and a cursor movement back up.
# Longer delay in seconds for rows of a program that has moved the cursor up. Some programs draw all bars and then pause
# below the last bar.
_HELD_AGAIN_S = 3.0
GLIMPSE_S = 10.0

_TOKEN = re.compile(r"\n|\r|\x1b\[(?P<count>[0-9]{0,3})(?P<move>[ABEF])|\x1b\[[01]?G|\x1b\[[02]?K|[^\n\r\x1b]+|\x1b")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:?]{0,32})?\Z")


class ScreenRow:
    """An emulated terminal row. `rewritten` is True for a row that contains a progress bar."""

    def __init__(self) -> None:
        self.text = ""
        self.rewritten = False
        self.left_ns = 0  # Time at which the cursor moved below this row.
        self._from_start = False
        self._cut = 0

    def write(self, text: str) -> None:
        """Append text to the row. After a carriage return, replace the row's text."""
        if self._from_start:
            self.clear()
        room = LINE_CHARACTERS_MAX - len(self.text)
        self.text += text[:room]
        self._cut += max(0, len(text) - room)

    def go_to_start(self) -> None:
        """Handle a carriage return, and keep the row's text visible until new text arrives."""
        self._from_start = True

    def erase(self, sequence: str) -> None:
        """Erase the row, or only the part after the cursor. After a carriage return, erase the whole row."""
        if self._from_start or sequence == "\x1b[2K":
            self.clear()
        else:
            self.write(sequence)

    def clear(self) -> None:
        """Clear the row and mark it as rewritten."""
        self.text, self._cut = "", 0
        self.rewritten, self._from_start = True, False

    def final(self, *, broken: bool = False) -> str:
        """Return the row's text for printing. `broken` means that an unknown part of the text is missing."""
        if not self._cut:
            return self.text
        return f"{self.text} … and {'' if broken else f'{self._cut} characters '}more in this line"

    @property
    def blank(self) -> bool:
        """True if the row has no visible text."""
        return not self.text.strip()


class Screen:
    """The emulated terminal of one stream of one rank, with its unfinished rows."""

    def __init__(self) -> None:
        self.touched_ns = 0
        self._rows = [ScreenRow()]
        self._cursor = 0
        self._goes_up = False
        self._pending = ""
        self._glimpsed_ns: int | None = None
        self._glimpsed: list[str] = []

    @property
    def open_rows(self) -> list[str]:
        """The unfinished rows that contain visible text."""
        return [row.final() for row in self._rows if not row.blank]

    @property
    def held(self) -> bool:
        """True if a later call of `settle` will return finished rows."""
        return self._cursor > 0

    @property
    def moving(self) -> bool:
        """True while a progress bar is open."""
        return any(row.rewritten and not row.blank for row in self._rows)

    def feed(self, text: str, now_ns: int) -> list[str]:
        """Process a chunk of rank output. Return the output lines that are now final."""
        self.touched_ns = now_ns
        text = self._pending + text
        unfinished = _UNFINISHED.search(text)
        self._pending = unfinished[0] if unfinished else ""
        lines: list[str] = []
        for match in _TOKEN.finditer(text, 0, len(text) - len(self._pending)):
            if match[0] == "\n":
                lines += self._newline()
            else:
                self._draw(match)
        if not self.moving:
            self._glimpsed_ns = None
        elif self._glimpsed_ns is None:
            self._glimpsed_ns = now_ns
        return lines

    def settle(self, now_ns: int) -> list[str]:
        """Return the rewritten rows whose delay after the newline has expired."""
        held_ns = (_HELD_AGAIN_S if self._goes_up else HELD_S) * 1e9
        lines: list[str] = []
        while self._cursor > 0 and now_ns - self._rows[0].left_ns >= held_ns:
            lines += self._commit(1)
        return lines

    def glimpse(self, now_ns: int) -> list[str]:
        """Return the changed progress bars every ten seconds, for outputs that cannot redraw lines."""
        if self._glimpsed_ns is None or now_ns - self._glimpsed_ns < GLIMPSE_S * 1e9:
            return []
        seen = [row.final() for row in self._rows if row.rewritten and not row.blank]
        self._glimpsed_ns = now_ns
        self._glimpsed, before = seen, self._glimpsed
        return seen if seen != before else []

    def end(self, *, broken: bool = False) -> list[str]:
        """Return all unfinished rows at the end of the output. `broken` means that later output is missing."""
        if self._pending:
            self._rows[self._cursor].write(self._pending)
        return [row.final(broken=broken) for row in self._rows if not row.blank]

    def _draw(self, match: re.Match[str]) -> None:
        row, token = self._rows[self._cursor], match[0]
        if match["move"]:
            self._move(match["move"], int(match["count"] or 1))
        elif not token.startswith(("\r", "\x1b[")):
            row.write(token)
        elif token.endswith("K"):
            row.erase(token)
        else:
            row.go_to_start()

    def _move(self, direction: str, count: int) -> None:
        up = direction in "AF"
        self._goes_up = self._goes_up or up
        before = self._cursor
        self._cursor = max(0, min(len(self._rows) - 1, before + (-count if up else count)))
        for row in self._rows[before : self._cursor]:
            row.left_ns = self.touched_ns
        if direction in "EF":
            self._rows[self._cursor].go_to_start()

    def _newline(self) -> list[str]:
        row = self._rows[self._cursor]
        row.left_ns = self.touched_ns
        self._cursor += 1
        if self._cursor == len(self._rows):
            self._rows.append(ScreenRow())
        else:
            self._rows[self._cursor].go_to_start()
        over = max(0, len(self._rows) - ROWS_MAX)
        if not row.rewritten and not (self._goes_up and row.blank):
            return self._commit(self._cursor)
        return self._commit(over if self._goes_up else self._cursor - 1)

    def _commit(self, count: int) -> list[str]:
        """Remove `count` rows from the top, but no row below the cursor. Return the removed rows as lines."""
        count = min(count, self._cursor)
        gone, self._rows = self._rows[:count], self._rows[count:]
        self._cursor -= count
        return [row.final() for row in gone if not (row.rewritten and row.blank)]


class Screens:
    """The screens of all ranks with unfinished output, by rank and stream."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, str], Screen] = {}

    def feed(self, rank: int, stream: str, text: str, now_ns: int) -> list[str]:
        """Process a chunk of a rank's output. Return the output lines that are now final."""
        return self.by_stream.setdefault((rank, stream), Screen()).feed(text, now_ns)

    def settle(self, now_ns: int) -> Iterator[tuple[int, str, list[str]]]:
        """Yield the rank, the stream and the lines of rewritten rows whose delay has expired."""
        for (rank, stream), screen in self.by_stream.items():
            yield rank, stream, screen.settle(now_ns)

    def end(self, rank: int, stream: str, *, broken: bool = False) -> list[str]:
        """Return the unfinished lines of one stream. The next output of the stream starts a new screen."""
        screen = self.by_stream.pop((rank, stream), None)
        return [] if screen is None else screen.end(broken=broken)

    def end_all(self) -> Iterator[tuple[int, str, list[str]]]:
        """Yield the rank, the stream and the lines of all unfinished rows."""
        for rank, stream in list(self.by_stream):
            yield rank, stream, self.end(rank, stream)


RESET = "\x1b[0m"
_SGR = r"\x1b\[[0-9;:]{0,64}m"
_CONTROL = re.compile(
    rf"(?P<colour>{_SGR})"
    r"|(?P<gone>(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # An OSC sequence ends with BEL or ST.
    r"|\x1b\[[0-9;]{0,16}[A-HJKf]|\x1b\[\?25[hl]|\x1b[()][0-9A-Z])"
    r"|(?P<control>[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069])"
)
_PIECE = re.compile(rf"{_SGR}|.", re.DOTALL)
_RESETS = ("\x1b[m", RESET)


def safe(line: str, *, tty: bool) -> str:
    """Return a rank's line without harmful control sequences.

    Return the line unchanged if the output is not a terminal.
    """
    if not tty:
        return line
    colours: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        if match["colour"]:
            colours.append(match["colour"])
            return match["colour"]
        if not match["control"]:
            return ""
        number = ord(match["control"])
        return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"

    text = _CONTROL.sub(replaced, line)
    return text + RESET if colours and colours[-1] not in _RESETS else text


def fit(line: str, columns: int) -> str:
    """Return the start of a `safe` line that fits into the given columns.

    Colour sequences occupy no columns.
    """
    kept: list[str] = []
    used = 0
    for match in _PIECE.finditer(line.replace("\t", " ")):
        piece = match[0]
        width = 0 if len(piece) > 1 else _columns(piece)
        if used + width > columns:
            return "".join(kept) + (RESET if "\x1b" in line else "")
        used += width
        kept.append(piece)
    return "".join(kept)


def _columns(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
