r"""Makes rank output safe for a terminal, and measures its width. Pure.

The writer of a rank's output is not the owner of the terminal: a data set's file name can hold a sequence that changes
the title, fills the clipboard or forges a line. So on a terminal

    colours (SGR)                              stay, and end with their line
    cursor movement and erasing, charsets      vanish: left over from programs that draw, for example progress bars
    OSC: titles, clipboard, links              vanish, the linked text stays
    other control characters, bidi controls    become visible: \x1b, \u202e

A file or a pipe gets the text as it is. An unfinished sequence is made visible, so a line is safe by itself.
"""

from __future__ import annotations

import re
import unicodedata

RESET = "\x1b[0m"
_SGR = r"\x1b\[[0-9;:]{0,64}m"
_CONTROL = re.compile(
    rf"(?P<colour>{_SGR})"
    r"|(?P<gone>(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC, ended by BEL or ST
    r"|\x1b\[[0-9;]{0,16}[A-HJKf]|\x1b\[\?25[hl]|\x1b[()][0-9A-Z])"
    r"|(?P<control>[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069])"
)
_PIECE = re.compile(rf"{_SGR}|.", re.DOTALL)
_RESETS = ("\x1b[m", RESET)


def safe(line: str, *, tty: bool) -> str:
    """Return one line of a rank's output, safe to print; unchanged without a terminal."""
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
    """Return the beginning of a `safe` line that takes at most so many columns; colours take none."""
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
