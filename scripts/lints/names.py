"""No module is called utils, common, helpers or manager.

Such a file has no reason not to grow, and its name tells a reader nothing. Name the module after the noun it owns or
the verb it does: `processes.py`, `placement.py`, `logs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from scripts.lints.source import AREAS_ALL, Finding, Source

AREAS = AREAS_ALL
EMPTY_WORDS = frozenset({"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"})


def check(source: Source) -> Iterator[Finding]:
    """Yield a file whose name, or a folder of whose path, says nothing."""
    for part in PurePosixPath(source.path).with_suffix("").parts:
        if not EMPTY_WORDS.isdisjoint(part.split("_")):
            message = f"'{part}' says nothing about what is in it; name it after the noun it owns or the verb it does"
            yield source.finding(1, "module-name", message)
