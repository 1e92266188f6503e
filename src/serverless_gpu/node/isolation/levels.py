"""Measures the isolation level that this node can offer.

The measurement creates the same sandbox and attempt as a run. A machine's settings do not show whether a container, a
security module or an old kernel refuses a step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.isolation import NONE, SANDBOX, USER, Level
from serverless_gpu.node.inside import seal
from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.isolation.principals import RANGE, uid_range
from serverless_gpu.node.processes.process_tree import controllers, find_cgroup_root
from serverless_gpu.node.processes.spawn import clean_variables, load_inside

_REHEARSAL_S = 20.0
_TRIALS = {"sandbox": "a trial sandbox", "own_uid": "a trial with a uid of its own"}
_LIMITS = ("memory", "pids")
_ORPHAN_S = 600.0  # Age in seconds after which no trial can use its directory any more.
_PREFIX = "sgpu-rehearsal-"


class OfferedLevel(NamedTuple):
    """The strongest isolation level of a node.

    `problem` is the reason for lacking a stronger level, a note about the means of the level, or "".
    """

    level: Level
    problem: str = ""


def remove_orphans(place: str = "") -> None:
    """Remove the directories of trial sandboxes whose process was killed. `place` holds temporary files."""
    parent, now_s = Path(place or tempfile.gettempdir()), SystemClock().wall_ns() / 1e9
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                if is_ours and now_s - status.st_ctime > _ORPHAN_S:
                    shutil.rmtree(path)


def problem_of_cgroups(environ: Mapping[str, str]) -> str:
    """Return the reason why this process cannot end all processes of an attempt by their cgroup, or ""."""
    cgroups = find_cgroup_root(f"serverless_gpu-rehearsal-{os.getpid()}", environ)
    try:
        return cgroups.problem if cgroups.path is None else ""
    finally:
        cgroups.close()


def missing_limits(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the controllers that this process cannot use for attempts: ``memory``, ``pids``."""
    cgroups = find_cgroup_root(f"serverless_gpu-rehearsal-{os.getpid()}", environ)
    try:
        found = controllers(cgroups.path)
        return tuple(name for name in _LIMITS if name not in found)
    finally:
        cgroups.close()


def measure(environ: Mapping[str, str]) -> OfferedLevel:
    """Return the isolation level that this process can give to runs. The call takes about 0.2 s."""
    if sys.platform != "linux":
        return OfferedLevel(NONE, "isolation needs Linux")
    if os.geteuid() != 0:
        return OfferedLevel(NONE, "isolation needs the rights of root, also in a user namespace")
    remove_orphans()
    try:
        uid = uid_range(environ.get(RANGE, ""))[-1]
        problem = seal.problem() or _rehearse("sandbox", uid, environ)
        if not problem:
            return OfferedLevel(SANDBOX)
        worse = _rehearse("own_uid", uid, environ)
    except (OSError, IsolationUnavailable) as error:
        return OfferedLevel(NONE, f"a trial cannot be made: {error}")
    return OfferedLevel(NONE, worse) if worse else OfferedLevel(USER, problem)


def _rehearse(module: str, uid: int, environ: Mapping[str, str]) -> str:
    """Try the isolation of a module in `node/inside`, with a uid without an owner. Raises OSError.

    Return the reason for a failure, or "".
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as place:
        at, home = Path(place, "root"), Path(place, "home")
        at.mkdir()
        home.mkdir()
        os.chown(home, uid, uid)
        view = View(uid=uid, at=str(at), home=str(home), python=sys.executable, shown=[], devices=[])
        program = (
            f"{load_inside()}from _sgpu_inside import {module}, sandbox\n"
            f"{module}.rehearse(sandbox.View(*{tuple(view)!r}))\n"
        )
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", program],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd="/",
                env=clean_variables(environ),
                timeout=_REHEARSAL_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{_TRIALS[module]} did not end within {_REHEARSAL_S:.0f} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{_TRIALS[module]} failed: {lines[-1] if lines else f'exit code {done.returncode}'}"
