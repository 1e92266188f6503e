"""Helpers of the tests of retention that other tests use as well."""

from __future__ import annotations

import os
from pathlib import Path

from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.model.calendars import DAY_NS


def make_run(runs: Path, *, age_ns: int = 2 * DAY_NS, kilobytes: int = 4, ended: bool = True) -> str:
    """Make the directory of a run as a supervisor leaves it, ended some time ago; return its id."""
    run_id = new_run_id()
    directory = runs / run_id / "1"
    (directory / "logs").mkdir(parents=True)
    (directory / "spec.json").write_text('{"run_id": "x", "fence": 1, "world_size": 2, "spec": {}, "version": "1"}')
    (directory / "logs" / "0.stdout").write_bytes(b"x" * 1024 * kilobytes)
    (directory / "supervisor.lock").touch()
    if ended:
        text = '{"type": "stopped", "state": "SUCCEEDED", "reason": "completed", "cause": null, "consequences": []}'
        (directory / "stopped.json").write_text(text)
    at_ns = SystemClock().wall_ns() - age_ns
    for path in (*directory.rglob("*"), directory, directory.parent):
        os.utime(path, ns=(at_ns, at_ns))
    return run_id
