"""HTML for notebooks: the state of an active run, and its receipt.

The module escapes all text that users or programs supply. The HTML has no scripts and no external resources. The HTML
uses colours that are readable on light and dark pages, and inherits the page's text colour. A front end without HTML
shows the plain text instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

_GOOD, _BAD, _BUSY, _NEUTRAL = "#3a9d5d", "#d9534f", "#3d8bd4", "#8c8c8c"
_COLOURS = {
    "RUNNING": _BUSY,
    "STOPPING": _BUSY,
    "SUCCEEDED": _GOOD,
    "FAILED": _BAD,
    "TIMED_OUT": _BAD,
    "BUDGET_STOPPED": _BAD,
    "LOST": _BAD,
}
_URL = re.compile(r"https?://[^\s<>\"'`\\]{1,2000}")
_BOX = "font-size:13px;line-height:1.45;margin:2px 0 4px 0;"
_FAINT = "opacity:0.7;"
_MONO = "font-family:monospace;white-space:pre;overflow-x:auto;"
# The style sets colour and size, because some front ends do not apply the page's text colour and size to tables.
_TABLE = "border-collapse:collapse;border:none;margin:4px 0 0 0;color:inherit;font-size:inherit;"
_EDGE = "border:none;border-top:1px solid rgba(128,128,128,0.3);background:transparent;vertical-align:top;"
_LABEL = f"{_EDGE}{_FAINT}text-align:left;padding:2px 16px 2px 0;white-space:nowrap;"
_VALUE = f"{_EDGE}text-align:left;padding:2px 0;white-space:normal;"


def status(state: str, sentence: str, lines: Sequence[str], tracked: str = "") -> str:
    """Return the state of an active run as HTML."""
    page = f'<div><span style="{_FAINT}">MLflow:</span> {link(tracked)}</div>' if tracked else ""
    progress = f'<div style="{_MONO}">{escape(chr(10).join(lines))}</div>' if lines else ""
    return f'<div style="{_BOX}">{_heading(state, sentence)}{page}{progress}</div>'


def table(state: str, sentence: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a heading and a table with one row per label. The table shows web addresses as links."""
    cells = "".join(
        f'<tr style="background:transparent"><td style="{_LABEL}">{escape(label)}</td>'
        f'<td style="{_VALUE}">{link(value) if _URL.fullmatch(value) else escape(value)}</td></tr>'
        for label, value in rows
    )
    body = f'<table style="{_TABLE}">{cells}</table>' if cells else ""
    return f'<div style="{_BOX}">{_heading(state, sentence)}{body}</div>'


def unfolding(state: str, lines: Sequence[str], whole: str) -> str:
    """Return the given lines in the colour of the run's state, with expandable details."""
    first, *others = (escape(line) for line in lines)
    more = "".join(f"<div>{line}</div>" for line in others)
    summary = f'<summary style="cursor:pointer">{_dot(state)} {first}</summary>'
    return f'<div style="{_BOX}"><details>{summary}{whole}</details>{more}</div>'


def link(url: str) -> str:
    """Return a link that opens in a new tab, or plain text for text that is not a web address."""
    shown = escape(url)
    if not _URL.fullmatch(url):
        return shown
    return f'<a href="{shown}" target="_blank" rel="noopener noreferrer" style="color:inherit">{shown}</a>'


def _heading(state: str, sentence: str) -> str:
    said = f' <span style="{_FAINT}">{escape(sentence)}</span>' if sentence else ""
    return f"{_dot(state)} <b>{escape(state)}</b>{said}"


def _dot(state: str) -> str:
    return f'<span style="color:{_COLOURS.get(state, _NEUTRAL)}">●</span>'
