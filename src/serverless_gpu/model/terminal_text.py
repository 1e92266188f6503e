"""Converts terminal output to plain text without escape sequences."""

from __future__ import annotations

import re

_STRINGS = "[PX^_\\]]"  # DCS, SOS, PM, APC and OSC, which end with BEL or ST. A line feed also ends them.
_ESCAPES = re.compile(
    rf"(?:\x1b\[|\x9b)[0-?]{{0,64}}[ -/]{{0,8}}[@-~]?"  # CSI
    rf"|(?:\x1b{_STRINGS}|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]{{0,2048}}(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]{0,8}[0-~]?"
)
_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_UNSEEN: dict[int, int | None] = {**_SYMBOLS, **dict.fromkeys(range(0x80, 0xA0))}
"""Replacements of control characters: symbols of the block "Control Pictures" for C0, nothing for C1."""


def plain_text(data: bytes) -> str:
    """Return the text of terminal output.

    A carriage return within a line overwrites the line, as on a terminal. Invalid UTF-8 becomes U+FFFD.
    """
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    if "\r" in text:
        text = "\n".join(_overwritten(line) for line in text.split("\n"))
    return text.translate(_UNSEEN)


def _overwritten(line: str) -> str:
    return next((part for part in reversed(line.split("\r")) if part), "")
