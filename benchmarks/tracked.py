"""Rounds about tracking and telemetry; they run in an interpreter that has MLflow (`.venv/mlflow`).

MLflow is the home's own server, which the first round waits for: what is measured is a call while it is there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks import ranks
from benchmarks.ours import joined
from benchmarks.ranks import RANKS
from serverless_gpu import Run, distributed
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note

_on = distributed(gpus=RANKS, gpu_type="CPU", quiet=True)(ranks.join)
_off = distributed(gpus=RANKS, gpu_type="CPU", quiet=True, tracking=False)(ranks.join)
_nap = distributed(gpus=8, gpu_type="H100", quiet=True)(ranks.nap)

_SERVER_S = 60.0
_WATCHED_S = 10.0
_PAUSE_S = 0.5
_rounds = {"count": 0}


def on_and_off(directory: str) -> dict[str, object]:
    """Call with tracking and without, in turns of who is first; until both ranks are in the process group."""
    _rounds["count"] += 1
    if _rounds["count"] == 1:
        _await_server(directory)
    calls = {"ms": _on, "off_ms": _off}
    told: dict[str, object] = {}
    for key in sorted(calls, reverse=_rounds["count"] % 2 == 0):
        where = Path(directory, key)
        where.mkdir()
        times = joined(calls[key].submit, str(where))
        told[key] = times["ms"]
        if "note" in times:
            told["note"] = times["note"]
        time.sleep(_PAUSE_S)
    return told


def watched(directory: str) -> dict[str, object]:
    """Sample 8 declared GPUs and their ranks, once a second: the monitor's CPU for each second, and its memory."""
    os.environ["SERVERLESS_GPU_FAKE"] = "H100:8"
    run = _nap.submit(directory)
    try:
        for rank in range(8):
            ranks.await_stamp(directory, "enter", rank)
        _await_samples(run)
        pid = _monitor()
        before, begun_ns = _cpu_ms(pid), ranks.now_ns()
        time.sleep(_WATCHED_S)
        seconds = (ranks.now_ns() - begun_ns) / 1e9
        return {"ms": (_cpu_ms(pid) - before) / seconds, "mb": _resident_mb(pid)}
    finally:
        run.cancel()
        run.receipt()


def _await_server(directory: str) -> None:
    """Call until a run is tracked.

    Raises:
        RuntimeError: none was.
    """
    until = time.monotonic() + _SERVER_S
    number = 0
    while time.monotonic() < until:
        where = Path(directory, f"first-{number}")
        where.mkdir()
        run = _on.submit(str(where))
        run.wait()
        run.receipt()
        number += 1
        for _ in range(10):
            if run.tracked() is not None:
                return
            time.sleep(_PAUSE_S)
    raise RuntimeError(f"no run was tracked within {_SERVER_S:.0f} s: is there MLflow in this interpreter?")


def _await_samples(run: Run[None]) -> None:
    while len(run.metrics().get("system/node_0/cpu_utilization_percentage", ([], []))[0]) < 3:
        time.sleep(_PAUSE_S)


def _monitor() -> int:
    """Return the pid of the home's monitor."""
    sockets = Home(Path(os.environ["SERVERLESS_GPU_HOME"])).sockets()
    notes = [note for path in sockets.glob("monitor-*.lock") if (note := held_note(path))]
    return int(notes[0].split()[0])


def _cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6
