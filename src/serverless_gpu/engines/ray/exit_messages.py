"""What Ray wrote → why it ended, in one line; pure.

Ray ends with hundreds of lines: a state dump, a stack. What a person can act on is one of a few sentences in between.
"""

from __future__ import annotations

import re

CHARACTERS_MAX = 300
_KNOWN: tuple[tuple[str, str], ...] = (
    (r"GCS returned an authentication error", "the head of the pool was started anew, and this machine joins that one"),
    (
        r"failed to connect to GCS|Failed to connect to GCS|GCS.{0,40}(is dead|timed? ?out)",
        "the head of the pool is gone",
    ),
    (r"Version mismatch", "this machine and the head have different versions of Ray or Python"),
    (
        r"(?i)token.{0,60}(invalid|mismatch|unauthenticated)|UNAUTHENTICATED",
        "the head does not take this machine's token",
    ),
    (r"(?i)bind: address already in use|address already in use", "one of its ports is taken by somebody else"),
    (r"(?i)no space left on device", "there is no space left on a disk, or in /dev/shm"),
    (
        r"marked.{0,40}as dead|has been marked dead",
        "the head had given this machine up: it did not hear of it for seconds",
    ),
)
_EXITED = re.compile(r"(\w+) \[exit code=(-?\d+)\]")
_RAISED = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception): .+)$", re.MULTILINE)
_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\t(INFO|WARNING|ERR|ERROR|SUCC)\s+\S+:\d+ -- ")


def why_ended(written: bytes) -> str:
    """Return why Ray ended."""
    text = written.decode("utf-8", errors="replace")
    for pattern, sentence in _KNOWN:
        if re.search(pattern, text):
            return sentence
    exited = _EXITED.findall(text)
    if exited:
        return ", ".join(f"its {name} ended with {code}" for name, code in dict.fromkeys(exited))
    raised = _RAISED.findall(text)
    if raised:
        return _shown(raised[-1])
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    last = next((line for line in reversed(lines) if line and line.strip("-")), "")
    return _shown(last) or "it wrote nothing"


def _shown(line: str) -> str:
    return "".join(letter for letter in line if letter.isprintable())[:CHARACTERS_MAX]
