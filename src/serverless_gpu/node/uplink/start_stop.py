"""Starts and ends the uplink of a home, and tests if it runs.

    engine ──ensure──▶ lock held, same version? ─▶ nothing
                       lock held, other version ─▶ end it and start a new uplink: attempts continue
                       free                     ─▶ start an uplink, detached

Each home and profile has one uplink. A second uplink for the same home and profile exits, because the first uplink
holds a lock. The uplink outlives its starter.
"""

from __future__ import annotations

import hashlib
import os
import select
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from serverless_gpu import faults
from serverless_gpu.ambient import CLOCK_FAULT
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.base.requirements import require_for_runs
from serverless_gpu.node.processes import daemon
from serverless_gpu.version import __version__

_START_S = 30.0
END_S = 10.0
_TRIES = 100
_PAUSE_S = 0.01  # Seconds between two tries to lock a file. Another process's test holds the lock briefly.
PASSED_ON = ("SERVERLESS_GPU_FAKE", "CUDA_VISIBLE_DEVICES", faults.VARIABLE, CLOCK_FAULT)
"""Variables that declare the node's devices, and variables that only tests use."""


class RunningUplink(NamedTuple):
    """Pid and version of a running uplink."""

    pid: int
    version: str


def lock_path(home: Home, profile: Path) -> Path:
    """Return the file that an uplink locks for its lifetime."""
    digest = hashlib.sha256(os.fsencode(profile.absolute())).hexdigest()[:12]
    return home.sockets() / f"uplink-{digest}.lock"


def running(home: Home, profile: Path) -> RunningUplink | None:
    """Return the uplink of a home and profile, or None if no uplink runs."""
    return _noted(lock_path(home, profile))


def ensure(home: Home, profile: Path, environ: Mapping[str, str]) -> bool:
    """Ensure that an uplink of this version runs. Return True if this call started the uplink.

    `environ` contains the variables for the uplink: declarations of devices, and a few variables that every process
    needs.
    Raises AgentUnavailable, HardwareError or StorageError.
    """
    found = running(home, profile)
    if found is not None and found.version == __version__:
        return False
    if found is not None:
        _end(found.pid)
    start(home, profile, environ)
    return True


def start(home: Home, profile: Path, environ: Mapping[str, str]) -> None:
    """Start an uplink, which detaches itself. Raises the same exceptions as `ensure`."""
    require_for_runs(home)
    passed = {name: environ[name] for name in PASSED_ON if name in environ}
    arguments = (str(home.root), str(profile.absolute()), passed)
    try:
        process = daemon.start(
            "serverless_gpu.node.uplink.process", arguments, log=home.root / "uplink.log", environ=environ
        )
    except OSError as error:
        raise AgentUnavailable(f"could not start the uplink of this node: {error}") from error
    daemon.reap(process, _START_S)


def stop(home: Home, profile: Path) -> bool:
    """End the uplink of a home and profile. Return True if the uplink ran.

    The uplink's attempts continue.
    """
    found = running(home, profile)
    if found is not None:
        _end(found.pid)
    return found is not None


def stop_all(home: Home) -> int:
    """End every uplink of a home and return their number. The uplinks' attempts continue to run.

    Raises AgentUnavailable if an uplink does not end.
    """
    count = 0
    for path in home.sockets().glob("uplink-*.lock"):
        found = _noted(path)
        if found is not None:
            _end(found.pid)
            count += 1
    return count


def _noted(path: Path) -> RunningUplink | None:
    """Return the uplink that holds a lock. Wait briefly if the uplink has not written its pid yet."""
    for _ in range(_TRIES):
        note = held_note(path)
        if note is None:
            return None
        words = note.decode("ascii", "replace").split()
        if len(words) == 2 and words[0].isdigit() and os.path.exists(f"/proc/{words[0]}"):
            return RunningUplink(int(words[0]), words[1])
        select.select([], [], [], _PAUSE_S)
    return None


def _end(pid: int) -> None:
    if not daemon.end(pid, END_S):
        raise AgentUnavailable(f"the uplink (pid {pid}) did not end after it was killed")
