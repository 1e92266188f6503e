"""The server that is measured: `python -m benchmarks.load.measured TICKS OPTIONS…` is `sgpu OPTIONS…`, with a watch.

How long each tick of each loop took is appended to the file TICKS: name and milliseconds. Nothing else is another than
in `sgpu up`, but that a node may have 16,384 devices: no machine has so many, and a run has one node.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from serverless_gpu import cli
from serverless_gpu.server import startup
from serverless_gpu.server.core.loops import Loop, Tick
from serverless_gpu.server.nodes import agent_service

DEVICES_MAX = 16_384


def main() -> None:
    """Be the server."""
    with open(sys.argv[1], "a", encoding="ascii", buffering=1) as ticks:
        startup.Loop = _timed(ticks)  # type: ignore[attr-defined,assignment] # a watch around it
        agent_service.DEVICES_MAX = DEVICES_MAX
        sys.argv = ["sgpu", *sys.argv[2:]]
        cli.main()


def _timed(ticks: TextIO) -> Callable[..., Loop]:
    lock = threading.Lock()

    def loop(name: str, tick: Tick, **options: Any) -> Loop:
        def timed(now_ns: int) -> int | None:
            began_ns = time.perf_counter_ns()
            try:
                return tick(now_ns)
            finally:
                took_ms = (time.perf_counter_ns() - began_ns) / 1e6
                with lock:
                    ticks.write(f"{name} {took_ms:.3f}\n")

        return Loop(name, timed, **options)

    return loop


if __name__ == "__main__":
    main()
