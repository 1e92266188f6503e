"""Starts, asks and ends MLflow servers, without waiting for MLflow, which takes seconds to start.

    ensure_server ──▶ lock held     ─▶ what its keeper wrote
                      free          ─▶ a keeper is started (a few milliseconds; two at once: the lock decides)
                      failed lately ─▶ why, until it is time to try again: 5 s, 10 s, … 10 min
    stop_server ────▶ SIGTERM to the keeper, which ends the server; after a while SIGKILL, and the kernel ends it

Failure cases: the keeper cannot be started, or no file written (a problem in words, never an exception); the home lies
on a network file system, and another machine's keeper has the lock (reported, and nothing is started: two servers would
write into one database).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.ambient import Clock, SystemClock, machine
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.inside.linux import descendants
from serverless_gpu.node.mlflow_server.files import Noted, ServerFiles, Stage, pause_s, place_of, places
from serverless_gpu.node.processes.spawn import clean_process, open_log

PASSED_ON = ("PYTHONPATH", "PYTHONHOME")
_END_S = 10.0
_ENDING_LOOKS = 20
_ENDING_PAUSE_S = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_started: list[tuple[Path, subprocess.Popen[bytes]]] = []  # keepers of ours: they may not have their lock yet


class Serving(NamedTuple):
    """Address and state of an MLflow server."""

    uri: str  # where it is, or will be
    ready: bool  # whether it answers
    problem: str = ""  # why it does not; "" while it starts for the first time, or is well
    is_restarting: bool = False  # it died, and its keeper starts it again: `problem` will pass
    failures: int = 0  # failed starts in a row, before the try that may be going on


class MlflowServer(NamedTuple):
    """An MLflow server of this home, as it is now."""

    place: ServerFiles
    uri: str
    store: str  # "" for the home's own
    stage: Stage  # ``"none"`` before the first start
    pid: int | None = None  # None where it does not run
    version: str = ""
    python: str = ""
    served_by: str = ""
    problem: str = ""
    memory_bytes: int = 0  # with its children
    used_s: float = 0.0  # since its last use


def ensure_server(
    home: Home, python: str, store: str = "", *, environ: Mapping[str, str] | None = None, now: bool = False
) -> Serving:
    """Start a server in front of a store if needed, and count as its user; returns at once.

    `python` has the MLflow of a new server; `store` is "" for the home's own. Of `environ`, the variables by which
    Python finds modules are passed on. `now` tries again after a recent failure, and waits at most a second for the
    failed keeper to end.
    """
    place, clock = place_of(home, store), SystemClock()
    try:
        place.make()
        place.touch()
    except OSError as error:
        return Serving("", False, f"{place.directory} cannot be written to: {error.strerror or error}")
    holder = _ending(place) if now else _holder(place)
    noted = place.noted()  # after the lock: what one that has just ended wrote last
    if holder is not None:
        return _kept(place, noted, holder)
    _started[:] = [each for each in _started if each[1].poll() is None]
    if any(path == place.lock and child.pid != noted.keeper for path, child in _started):  # about to take its lock
        return Serving(place.uri(noted), False, failures=noted.failures)
    if not now and _is_too_soon(noted, python, clock):
        return Serving(place.uri(noted), False, noted.problem)
    problem = ""
    try:
        start_keeper(place, python, environ or {})
    except OSError as error:
        problem = f"the MLflow server could not be started: {error.strerror or error}"
    return Serving(place.uri(noted), False, problem, failures=noted.failures)


def kept(place: ServerFiles) -> Serving | None:
    """Return how a server is as its keeper says; None without a keeper, or before its first report."""
    holder, noted = _holder(place), place.noted()
    return _kept(place, noted, holder) if holder and noted.keeper == holder else None


def look(place: ServerFiles, clock: Clock) -> MlflowServer:
    """Return how a server is; nothing is started."""
    holder, noted = _holder(place), place.noted()
    stage, problem = noted.stage, noted.problem
    if holder is None and stage in ("starting", "ready"):
        stage, problem = "stopped", ""  # its keeper was killed, and no process starts it again
    serving = _kept(place, noted, holder) if holder is not None else Serving(place.uri(noted), False, problem)
    pid = noted.server if holder is not None and noted.machine == machine() and noted.server else None
    used_s = 0.0
    with contextlib.suppress(OSError):
        used_s = max(0.0, clock.wall_ns() / 1e9 - place.used.stat().st_mtime)
    return MlflowServer(
        place=place,
        uri=serving.uri,
        store=place.store,
        stage=stage,
        pid=pid,
        version=noted.version,
        python=noted.python,
        served_by=noted.served_by,
        problem=serving.problem,
        memory_bytes=_memory_bytes(pid) if pid is not None else 0,
        used_s=used_s,
    )


def servers(home: Home) -> list[MlflowServer]:
    """Return how all servers of a home are."""
    clock = SystemClock()
    return [look(place, clock) for place in places(home)]


def stop_server(place: ServerFiles) -> bool:
    """End a server and wait until it is gone; return whether it ran.

    Raises AgentUnavailable when it does not end, or is on another machine.
    """
    holder = _holder(place)
    if holder is None:
        return False
    noted = place.noted()
    if noted.machine not in ("", machine()):
        raise AgentUnavailable(f"the MLflow server of this home runs on {noted.host}", hint="end it there")
    _end(holder)
    return True


def stop_servers(home: Home) -> int:
    """End all MLflow servers of a home, and return how many ran; raises AgentUnavailable if one stays."""
    return sum(stop_server(place) for place in places(home))


def start_keeper(
    place: ServerFiles, python: str, environ: Mapping[str, str], *, owner: int = -1, hosts: str = ""
) -> subprocess.Popen[bytes]:
    """Start and return the process that keeps a server with made files; it ends if another has the lock.

    With `owner`, a descriptor (-1: none), the keeper ends with its last copy elsewhere, and not for want of use.
    `hosts` are further names the server answers to, with commas. Raises OSError.
    """
    passed = {name: environ[name] for name in PASSED_ON if name in environ}
    log = open_log(place.directory / "keeper.log")
    try:
        child = clean_process(
            "serverless_gpu.node.mlflow_server.keeper",
            (str(place.directory), python, passed, owner, hosts),
            fds=() if owner < 0 else (owner,),
            log=log,
            environ=os.environ,
        )
        _started.append((place.lock, child))
        return child
    finally:
        os.close(log)


def _kept(place: ServerFiles, noted: Noted, holder: int) -> Serving:
    if noted.machine not in ("", machine()):
        problem = (
            f"the MLflow server of {place.directory} runs on another machine, {noted.host}; set MLFLOW_TRACKING_URI to "
            "a server that all of them reach"
        )
        return Serving("", False, problem)
    is_its = noted.keeper == holder  # else what is written is its predecessor's
    if not is_its:
        return Serving(place.uri(noted), False, failures=noted.failures)
    is_restarting = noted.stage == "starting" and bool(noted.problem)
    return Serving(place.uri(noted), noted.stage == "ready", noted.problem, is_restarting, noted.failures)


def _is_too_soon(noted: Noted, python: str, clock: Clock) -> bool:
    if noted.stage != "failed":
        return False
    whole_s = pause_s(noted.failures)
    left_s = (noted.retry_wall_ns - clock.wall_ns()) / 1e9
    if python != noted.python:  # it may have what the other one lacks: it waits for the shortest pause only
        left_s -= whole_s - pause_s(1)
    return 0 < left_s <= whole_s  # else the clock was set


def _holder(place: ServerFiles) -> int | None:
    """Return the pid of a server's keeper: 0 before it has written that down, None without one."""
    note = held_note(place.lock)
    if note is None:
        return None
    return int(note) if note.strip().isdigit() else 0


def _ending(place: ServerFiles) -> int | None:
    """Return as `_holder` who keeps a server, after some time for one that has given up to end."""
    for _ in range(_ENDING_LOOKS):
        holder = _holder(place)
        if holder is None or not place.noted().problem:
            break
        select.select([], [], [], _ENDING_PAUSE_S)
    return holder


def _memory_bytes(pid: int) -> int:
    total = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{each}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    return total


def _end(pid: int) -> None:
    try:
        process = os.pidfd_open(pid) if pid else -1
    except ProcessLookupError:
        return
    if process < 0:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
            if select.select([process], [], [], _END_S)[0]:
                return
        raise AgentUnavailable(f"the keeper of the MLflow server (pid {pid}) does not end, although it was killed")
    finally:
        os.close(process)
