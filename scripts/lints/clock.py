"""Allows only `ambient.py` to read the calendar; other code takes times as values.

A wall clock jumps (NTP, suspend, manual changes), so a deadline computed from it ends runs early or never. Tests of
code that reads it would have to sleep. Deadlines come from `Clock.boottime_ns`, calendar time from `Clock.wall_ns`.
`node/inside` cannot import `ambient`. It reads `time.clock_gettime_ns(time.CLOCK_BOOTTIME)` or `time.monotonic`, which
this lint allows.
"""

from __future__ import annotations

from collections.abc import Iterator

from scripts.lints.source import Finding, Source

AREAS = ("src",)
ROOM = "src/serverless_gpu/ambient.py"
WALL_CLOCKS = frozenset(
    {
        "datetime.date.today",
        "datetime.datetime.now",
        "datetime.datetime.today",
        "datetime.datetime.utcnow",
        "time.CLOCK_REALTIME",
        "time.ctime",
        "time.time",
        "time.time_ns",
    }
)


def check(source: Source) -> Iterator[Finding]:
    """Yield every read of a wall clock outside `ambient.py`."""
    if source.path == ROOM:
        return
    for line, name in source.references():
        if name in WALL_CLOCKS:
            message = (
                f"{name} reads the wall clock; take a serverless_gpu.ambient.Clock and call boottime_ns() or wall_ns()"
            )
            yield source.finding(line, "wall-clock", message)
