"""What ranks do in these tests: leave a sign of life every few milliseconds, so that it can be seen when user code ran.

Standard library only. A line of `<fence>.beats` is a moment by this machine's boottime, which all namespaces share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAY_S = 100.0


def beat(where: str) -> int:
    """Beat until the file `go<fence>` is there; return the fence."""
    fence = int(os.environ["SGPU_FENCE"])
    print(f"attempt {fence} begins", flush=True)
    limit = time.monotonic() + _STAY_S
    with Path(where, f"{fence}.beats").open("a") as file:
        while not Path(where, f"go{fence}").exists():
            file.write(f"{time.clock_gettime_ns(time.CLOCK_BOOTTIME)}\n")
            file.flush()
            if time.monotonic() > limit:
                raise TimeoutError("nobody said that it is enough")
            time.sleep(0.02)
    print(f"attempt {fence} returns", flush=True)
    return fence


def beats(where: str | Path, fence: int) -> list[int]:
    """Return the moments at which an attempt ran user code."""
    path = Path(where, f"{fence}.beats")
    return [int(line) for line in path.read_text().split()] if path.exists() else []
