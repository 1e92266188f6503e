"""Modules are named by the noun that they hold: no `utils`, no `helpers`, no verb forms.

A file called `utils` has no reason not to grow. A file called `allowing` or `taking` says that something happens, and a
reader who looks for usage policies or snapshots does not find it. Name the module after the noun that it holds, in the
field's words: `budget_admission.py`, `snapshot_capture.py`.
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
"""Words that end as verb forms do and that the field uses as nouns."""
STORED = frozenset({"client/estimating.py", "client/tracked.py", "node/devices/reservation.py"})
"""Modules below `src/serverless_gpu` with a verb form: stored pickles name the first two."""


def check(source: Source) -> Iterator[Finding]:
    """Yield a file whose name, or a folder of whose path, says nothing or is a verb form."""
    path = PurePosixPath(source.path)
    for part in path.with_suffix("").parts:
        if not EMPTY_WORDS.isdisjoint(part.split("_")):
            message = f"'{part}' says nothing about what is in it; name it after the noun that it holds"
            yield source.finding(1, "module-name", message)
    last = path.stem.rpartition("_")[2]
    inside = source.path.removeprefix("src/serverless_gpu/")
    if inside != source.path and last.endswith(("ing", "ed")) and last not in NOUNS and inside not in STORED:
        yield source.finding(1, "module-name", f"'{path.stem}' is a verb form; name it after the noun that it holds")
