"""What ranks do in tests of stops: count, and save the number when asked to. Little to import: limits are short."""

from __future__ import annotations

import json
import time
from pathlib import Path

from serverless_gpu import runtime as rt


def count(limit: int, gate: str = "") -> tuple[int, int, str | None]:
    """Count up to a limit, from where the attempt before got to; return both ends, and why it was asked to stop.

    Args:
        limit: how far.
        gate: the limit itself is reached once there is this file: not before a test has done what it is about.
    """
    rt.should_stop()  # from here on SIGTERM ends nothing
    found = rt.resume_dir()
    first = json.loads((found / "count.json").read_text())["count"] if found is not None else 0
    print("from", first, flush=True)
    reached = first
    while reached < limit and not rt.should_stop():
        if reached < limit - 1 or not gate or Path(gate).exists():
            reached += 1
        time.sleep(0.005)
    if rt.should_stop():
        unfinished = rt.checkpoint_dir() / "count.json.tmp"
        unfinished.write_text(json.dumps({"count": reached, "why": rt.stop_reason()}))
        unfinished.rename(unfinished.with_suffix(""))
    return first, reached, rt.stop_reason()


def stand_still() -> None:
    """Do nothing for longer than any test lets it."""
    time.sleep(600)


def saved(home: Path, run_id: str, fence: int = 1) -> dict[str, object]:
    """Return what an attempt saved."""
    record: dict[str, object] = json.loads((home / "checkpoints" / run_id / str(fence) / "count.json").read_text())
    return record
