"""Rounds through `@distributed`. Each function does one round in a fresh directory and returns milliseconds."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from benchmarks import ranks
from benchmarks.ranks import GIGABYTE, RANKS, now_ns, stamps
from serverless_gpu import Run, Session, distributed, session
from serverless_gpu.client.display.run_display import Display
from serverless_gpu.errors import RankCrashed
from serverless_gpu.node.inside import payload
from serverless_gpu.testing import agent_status, stop_agent

_two = distributed(gpus=RANKS, gpu_type="CPU", quiet=True)
_one = distributed(gpus=1, gpu_type="CPU", quiet=True)
_join = _two(ranks.join)
_join_restored = distributed(gpus=RANKS, gpu_type="CPU", quiet=True, env="snapshot")(ranks.join)
_first_line = _two(ranks.first_line)
_make_tensor = _one(ranks.make_tensor)
_die_beside_sleeper = _two(ranks.die_beside_sleeper)
_die_beside_collective = _two(ranks.die_beside_collective)
_flood = distributed(gpus=RANKS, gpu_type="CPU", quiet=True, ranks_log="all")(ranks.flood)
_fake_nap = distributed(gpus=RANKS, gpu_type="H100", quiet=True)(ranks.nap)


_sessions: list[Session] = []  # the one that is open in this contestant's process


def warm(directory: str) -> dict[str, object]:
    """Call with everything standing by; until every rank is in the process group."""
    return joined(_join.submit, directory)


def warm_snapshot(directory: str) -> dict[str, object]:
    """The same in a restored copy of the environment, which the first round captures and restores."""
    return joined(_join_restored.submit, directory)


def in_session(directory: str) -> dict[str, object]:
    """The same in a held session."""
    if not _sessions:
        _sessions.append(session(gpus=RANKS, gpu_type="CPU", quiet=True))
    return joined(lambda where: _sessions[0].submit(_join, where), directory)


def joined(submit: Callable[[str], Run[None]], directory: str) -> dict[str, object]:
    called_ns = now_ns()
    run = submit(directory)
    run.follow()  # the two halves of `.distributed()`; the handle tells whether the start was warm
    times = _since(called_ns, directory, "ready", returned_ns=now_ns())
    receipt = run.receipt()
    started = receipt.segments.start_ms
    times = times if started is None else {**times, "start_ms": float(started)}
    return times if receipt.warm else {**times, "note": f"started cold: {receipt.warm_reason}"}


def cold(directory: str) -> dict[str, object]:
    """Call with no agent and no zygote; until every rank is in the first line of the function."""
    stop_agent(_home())
    called_ns = now_ns()
    _first_line.distributed(directory)
    return _since(called_ns, directory, "enter", returned_ns=now_ns())


def killed_beside_sleeper(directory: str) -> dict[str, object]:
    """Rank 1 is killed while rank 0 sleeps; until the caller has the exception."""
    return _killed(_die_beside_sleeper.submit(directory), directory)


def killed_beside_collective(directory: str) -> dict[str, object]:
    """Rank 1 is killed while rank 0 waits for it in a collective; until the caller has the exception."""
    return _killed(_die_beside_collective.submit(directory), directory)


def cancel(directory: str) -> dict[str, object]:
    """Cancel while both ranks sleep; until the receipt says that the (declared) GPUs are verified free."""
    os.environ["SERVERLESS_GPU_FAKE"] = f"H100:{RANKS}"
    run = _fake_nap.submit(directory)
    for rank in range(RANKS):
        ranks.await_stamp(directory, "enter", rank)
    time.sleep(ranks.SETTLED_S)
    cancelled_ns = now_ns()
    run.cancel()
    receipt = run.receipt()
    took_ns = now_ns() - cancelled_ns
    if receipt.state != "CANCELLED" or receipt.quarantined:
        raise RuntimeError(f"not handed back: {receipt.state}, quarantined {receipt.quarantined}")
    return {"ms": took_ns / 1e6}


def tensor(directory: str) -> dict[str, object]:
    """Return a tensor of 1 GB; from when the rank has it until the caller has it, and has read it once."""
    (value,) = _make_tensor.distributed(directory, GIGABYTE)
    got_ns = now_ns()
    ranks.read(value)
    read_ns = now_ns()
    (made_ns,) = stamps(directory, "made", 1)
    del value
    shutil.rmtree(_home() / "runs")
    (_home() / "runs").mkdir(mode=0o700)
    os.sync()
    return {
        "ms": (got_ns - made_ns) / 1e6,
        "read_ms": (read_ns - made_ns) / 1e6,
    }


def payload_tensor(directory: str) -> dict[str, object]:
    """Write a tensor of 1 GB to a file and load it, in one process."""
    value = ranks.make_tensor(directory, GIGABYTE)
    path = os.path.join(directory, "value.pkl")
    started_ns = now_ns()
    payload.dump(value, path)
    loaded = cast("torch.Tensor", payload.load(path))
    got_ns = now_ns()
    ranks.read(loaded)
    read_ns = now_ns()
    os.unlink(path)
    os.sync()
    return {"ms": (got_ns - started_ns) / 1e6, "read_ms": (read_ns - started_ns) / 1e6}


def flood(directory: str) -> dict[str, object]:
    """Rank 0 writes 4 GiB: how long that takes it; meanwhile rank 1's lines, and the supervisor's memory."""
    run = _flood.submit(directory, ranks.FLOOD_BYTES)
    ear = _Ear(run.id)
    run._display = ear  # as `follow` does with a display that prints
    run.wait()
    run.results()
    run.receipt()  # after it nobody writes there any more
    (begun_ns,), (ended_ns,) = stamps(directory, "flooding", 1), stamps(directory, "flooded", 1)
    late_ms = [(heard_ns - said_ns) / 1e6 for said_ns, heard_ns in ear.lines if begun_ns < said_ns < ended_ns]
    shutil.rmtree(run.directory.parent)
    os.sync()
    return {
        "ms": (ended_ns - begun_ns) / 1e6,
        "gb_per_s": ranks.FLOOD_BYTES / (ended_ns - begun_ns),
        "late_ms": max(late_ms),
        "supervisor_mb": ear.supervisor_mb,
    }


class _Ear(Display):
    """Hears when rank 1's lines arrive, and looks at the supervisor's memory then."""

    def __init__(self, run_id: str) -> None:
        self.lines: list[tuple[int, int]] = []
        self.supervisor_mb = 0.0
        self._run_id = run_id
        self._status: Path | None = None

    def output(self, rank: int, stream: str, text: str) -> None:
        if rank != 1:
            return
        heard_ns = now_ns()
        self.lines += [(int(line), heard_ns) for line in text.split()]
        if self._status is None:
            status = agent_status(_home())
            attempts = status.attempts if status else ()
            pid = next(attempt.pid for attempt in attempts if attempt.run_id == self._run_id)
            self._status = Path("/proc") / str(pid) / "status"
        peak = self._status.read_text(encoding="ascii").partition("VmHWM:")[2].split()[0]
        self.supervisor_mb = max(self.supervisor_mb, int(peak) * 1024 / 1e6)


def _killed(run: Run[None], directory: str) -> dict[str, object]:
    try:
        run.results()
    except RankCrashed as error:
        caught_ns = now_ns()
        if error.rank != 1:
            raise RuntimeError(f"rank {error.rank} was blamed, rank 1 was killed") from error
    else:
        raise RuntimeError("a killed rank went unnoticed")
    killed_ns = int((Path(directory) / "killed-1").read_text(encoding="ascii"))
    return {"ms": (caught_ns - killed_ns) / 1e6}


def _since(called_ns: int, directory: str, event: str, *, returned_ns: int) -> dict[str, object]:
    times = {
        "ms": max(stamps(directory, event, RANKS)),
        "enter_ms": max(stamps(directory, "enter", RANKS)),
        "returned_ms": returned_ns,
    }
    return {name: (at_ns - called_ns) / 1e6 for name, at_ns in times.items()}


def _home() -> Path:
    return Path(os.environ["SERVERLESS_GPU_HOME"])
