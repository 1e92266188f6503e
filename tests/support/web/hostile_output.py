"""Hostile output of runs: what a rank writes, and the text that a page must show for it, and nothing else."""

from __future__ import annotations

import unicodedata

from tests.support.web.hostile import CORPUS

_TERMINAL: tuple[tuple[bytes, str], ...] = (
    (b"\x1b]8;;javascript:window.hacked=1\x07link\x1b]8;;\x07", "link"),
    (b"\x1b]8;;https://e/\x1b\\link two\x1b]8;;\x1b\\", "link two"),
    (b"\x1b[2J\x1b[1;1Hcleared", "cleared"),
    (b"\x1b[999999999mmany", "many"),
    (b"\x1b[" + b"1;" * 200 + b"m", ("1;" * 200)[65:] + "m"),
    (b"title\x1b]0;unended", "title"),
    (b"\xc2\x9b31mC1", "C1"),
    (b"\x9b31mraw", "\ufffd31mraw"),
    (b"\x1bPdcs\x1b\\after", "after"),
    (b"\x1b_apc\x07after two", "after two"),
    (b"\x1b[38;5;999mindex\x1b[38;2;300;-1;xmrgb", "indexmrgb"),
    (b"nul \x00 bell\x07 del \x7f", "nul \u2400 bell del \u2421"),
    (b"surrogate \xed\xa0\x80 \xff", "surrogate \ufffd\ufffd\ufffd \ufffd"),
    (b"back\x08\x08ed", "baed"),
    (b"50%\r100%", "100%"),
    (b"\x1b(B\x1b=\x1b7charset", "charset"),
)
_PLAIN = [text for text in CORPUS if not any(unicodedata.category(letter) == "Cc" for letter in text)]
HOSTILE_OUTPUT: tuple[tuple[bytes, str], ...] = (
    *((text.encode(), text) for text in (*_PLAIN, "e" + "\u0301" * 500)),
    *_TERMINAL,
)
"""Bytes of a line without its line feed, and the shown text."""
