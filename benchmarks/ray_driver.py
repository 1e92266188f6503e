"""A Ray driver that says when it is where; as a program: `python benchmarks/ray_driver.py DIRECTORY OPTIONS`.

It imports nothing but Ray, whoever starts it. OPTIONS are those of `ray.init`, as JSON. Times are as in `ranks`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path


def drive(directory: str, options: str = "{}") -> None:
    """Connect to the cluster, have it do something."""
    stamp(directory, "enter")
    ray = importlib.import_module("ray")
    stamp(directory, "imported")
    ray.init(**json.loads(options))
    stamp(directory, "ready")
    ray.get(ray.remote(work).remote())
    stamp(directory, "done")


def work() -> int:
    """Return the pid of whoever does it."""
    return os.getpid()


def stamp(directory: str, event: str) -> None:
    """Write down that this happens now."""
    at_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    path = Path(directory) / f"{event}-0"
    path.with_suffix(".part").write_text(str(at_ns), encoding="ascii")
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    drive(*sys.argv[1:])
