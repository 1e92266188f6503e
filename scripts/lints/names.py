"""Requires modules to be named by the noun that they hold: no `utils`, no `helpers`, no verb forms.

A file called `utils` can collect unrelated code without limit. A reader who looks for usage policies or snapshots does
not find them in a file called `allowing` or `taking`. Name the module after the noun that it holds, in the field's
vocabulary: `budget_admission.py`, `snapshot_capture.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from scripts.lints.source import AREAS_ALL, Finding, Source

AREAS = AREAS_ALL
EMPTY_WORDS = frozenset({"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"})
NOUNS = frozenset(
    {"billing", "caching", "charging", "feed", "listing", "logging", "metering", "polling", "pricing", "routing"}
    | {"scheduling", "seed", "sharing", "spending", "testing", "tracking"}
)
"""Words that end like verb forms but that the field uses as nouns."""
STORED = frozenset({"client/estimating.py", "client/tracked.py", "node/devices/reservation.py"})
"""Modules below `src/serverless_gpu` that keep a verb form. Stored pickles name the first two."""


def check(source: Source) -> Iterator[Finding]:
    """Yield each file whose path has a name without meaning (`utils`) or whose name is a verb form."""
    path = PurePosixPath(source.path)
    for part in path.with_suffix("").parts:
        if not EMPTY_WORDS.isdisjoint(part.split("_")):
            message = f"'{part}' does not describe its content; name it after the noun that it holds"
            yield source.finding(1, "module-name", message)
    last = path.stem.rpartition("_")[2]
    inside = source.path.removeprefix("src/serverless_gpu/")
    if inside != source.path and last.endswith(("ing", "ed")) and last not in NOUNS and inside not in STORED:
        yield source.finding(1, "module-name", f"'{path.stem}' is a verb form; name it after the noun that it holds")
