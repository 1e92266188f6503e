"""Where git finds the patterns that hold for all repositories of a user: `core.excludesFile`, or else its own place.

Read here: the settings of the system and of the user. A repository's own settings, files that they include and
`GIT_CONFIG_*` variables are not: git itself is never run.
"""

from __future__ import annotations

import os
import re

SYSTEM = "/etc/gitconfig"
_SETTINGS_BYTES_MAX = 1024 * 1024
_SECTION = re.compile(r'\s*\[\s*([A-Za-z0-9.-]+)\s*("(?:[^"\\]|\\.)*")?\s*\]')
_EXCLUDES = re.compile(r"\s*excludesfile\s*=(.*)", re.IGNORECASE)
_PIECE = re.compile(r'\\(.)|(")|([#;])|([^\\"#;]+)')
_ESCAPED = {"n": "\n", "t": "\t", "b": "\b"}


def user_patterns() -> tuple[str, tuple[str, ...]]:
    """Return the user's file of patterns ("" when there is to be none), and the files that say which one it is."""
    configured = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    settings = (SYSTEM, os.path.join(configured, "git", "config"), os.path.join(os.path.expanduser("~"), ".gitconfig"))
    found = os.path.join(configured, "git", "ignore")
    for file in settings:
        try:
            with open(file, "rb") as opened:
                said = excludes_file(opened.read(_SETTINGS_BYTES_MAX).decode(errors="surrogateescape"))
        except OSError:  # most are not there
            continue
        found = found if said is None else said
    return found, settings


def excludes_file(text: str) -> str | None:
    """Return `core.excludesFile` of one file of git's settings, or None; of several the last counts."""
    found, in_core = None, False
    for line in text.replace("\r\n", "\n").replace("\\\n", "").split("\n"):
        section = _SECTION.match(line)
        if section is not None:
            in_core = section[1].lower() == "core" and section[2] is None
            line = line[section.end() :]
        setting = _EXCLUDES.match(line) if in_core else None
        if setting is not None:
            found = os.path.expanduser(_value(setting[1]))
    return found


def _value(text: str) -> str:
    """Return a value without quotes, escapes and the comment after it."""
    value, quoted = "", False
    for escaped, quote, comment, plain in _PIECE.findall(text.strip()):
        if quote:
            quoted = not quoted
        elif comment and not quoted:
            return value.rstrip()
        else:
            value += _ESCAPED.get(escaped, escaped) or comment or plain
    return value
