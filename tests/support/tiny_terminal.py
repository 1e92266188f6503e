r"""A terminal as small as the tests of output need it: rows, `\r`, `\n`, cursor up, erasing; colours are left out.

Anything else that moves or hides text is an error: it must not have got here.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\r|\n|\x1b\[(\d*)([AKJ])|\x1b\[[0-9;:]*m|[^\r\n\x1b]+|.", re.DOTALL)


def screen(text: str) -> list[str]:
    """Return the rows a person sees after a program has printed this, trailing blanks removed."""
    rows, row, column = [""], 0, 0
    for match in _TOKEN.finditer(text):
        token, count, kind = match[0], match[1], match[2]
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0  # as a terminal driver does, which puts a carriage return before it
            rows += [""] * (row + 1 - len(rows))
        elif kind == "A":
            row = max(0, row - int(count or 1))
        elif kind == "K":
            rows[row] = rows[row][:column]
        elif kind == "J":
            rows[row:] = [rows[row][:column]]
        elif token[0] == "\x1b":
            assert token.endswith("m"), f"this must not reach a terminal: {text[match.start() :][:20]!r}"
        else:
            rows[row] = rows[row].ljust(column)[:column] + token + rows[row][column + len(token) :]
            column += len(token)
    return [found.rstrip() for found in rows]
