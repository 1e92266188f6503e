"""What ranks do: leave a sign of life every few milliseconds, then end as their kind of call says.

Each rank of each attempt has a file of its own, ``<name>.<run>.<fence>.<rank>.<pid>``: a line of JSON that says where
it runs, then a moment of CLOCK_BOOTTIME per line; a last line ``end`` when user code got that far.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TextIO

from serverless_gpu import runtime

_BEAT_S = 0.02
_SAVE_S = 0.5


def work(where: str, name: str, kind: str, seconds: float) -> tuple[str, int]:
    """Work for some seconds; return the name of the call and this rank's number.

    Args:
        where: the directory of signs of life.
        name: of the call.
        kind: of the call (`plan.EXPECTED`).
        seconds: how long.
    """
    run, fence, rank = os.environ["SGPU_RUN_ID"], os.environ["SGPU_FENCE"], os.environ["RANK"]
    place = {
        "crew": int(os.environ["NODE_RANK"]),
        "local": int(os.environ["LOCAL_RANK"]),
        "gpus": os.environ["SGPU_GPU_UUIDS"].split(","),
        "pid": os.getpid(),
        "stem": os.getppid(),
        "started": int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]),
    }
    with Path(where, f"{name}.{run}.{fence}.{rank}.{os.getpid()}").open("x") as signs:
        signs.write(json.dumps(place) + "\n")
        if kind in ("preempt", "resume"):
            _go_on(signs, seconds)
        else:
            _beat(signs, seconds)
        if int(rank) == int(os.environ["WORLD_SIZE"]) - 1:
            _end_as_planned(name, kind, fence)
        signs.write("end\n")
    return name, int(rank)


def _end_as_planned(name: str, kind: str, fence: str) -> None:
    if kind == "raises" or (kind == "retry" and fence == "1"):
        raise ValueError(f"planned by {name}")
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)


def _beat(signs: TextIO, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        signs.write(f"{time.clock_gettime_ns(time.CLOCK_BOOTTIME)}\n")
        signs.flush()
        if time.monotonic() >= until:
            return
        time.sleep(_BEAT_S)


def _go_on(signs: TextIO, seconds: float) -> None:
    """Work for the seconds that earlier attempts have not; save them now and then, and leave when asked to."""
    name = f"{os.environ['RANK']}.json"
    found = runtime.resume_dir()
    saved = found / name if found is not None else None
    worked = float(json.loads(saved.read_text())) if saved is not None and saved.exists() else 0.0
    stops = runtime.should_stop()  # from here on SIGTERM ends nothing
    while worked < seconds and not stops:
        part = min(_SAVE_S, seconds - worked)
        _beat(signs, part)
        worked += part
        unfinished = runtime.checkpoint_dir() / f"{name}.tmp"
        unfinished.write_text(json.dumps(worked))
        unfinished.rename(unfinished.with_suffix(""))
        stops = runtime.should_stop()
