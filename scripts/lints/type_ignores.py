"""Requires an error code and a reason for each `type: ignore`.

Without a code, the comment also hides the next error on that line. Without a reason, a later reader cannot judge
whether to remove it. mypy accepts two comments: `# type: ignore[attr-defined] # set by the C extension`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.lints.source import AREAS_ALL, Finding, Source

AREAS = AREAS_ALL
_IGNORE = re.compile(r"#\s*type:\s*ignore\b")
_WITH_CODE_AND_REASON = re.compile(r"#\s*type:\s*ignore\[[a-z0-9, -]+\]\s*#\s*(?!noqa|type:|pragma)\w+\W+\w+")


def check(source: Source) -> Iterator[Finding]:
    """Yield each ignore without a code or a reason."""
    if "ignore" not in source.text:  # reading the comments of each file takes seconds
        return
    for line, comment in source.comments:
        if _IGNORE.match(comment) and not _WITH_CODE_AND_REASON.match(comment):
            message = "needs an error code and a reason: # type: ignore[code]  # why this is right"
            yield source.finding(line, "type-ignore", message)
