"""Measures the isolation level that this node can offer.

The measurement creates the same sandbox and attempt as a run. A machine's settings do not show whether a container, a
security module or an old kernel refuses a step.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.isolation import NONE, SANDBOX, USER, Level
from serverless_gpu.node.inside import namespaces, seal
from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.isolation.principals import RANGE, uid_range
from serverless_gpu.node.processes.process_tree import find_cgroup_root
from serverless_gpu.node.processes.spawn import clean_variables, load_inside

_REHEARSAL_S = 20.0
_TRIALS = {"sandbox": "a trial sandbox", "own_uid": "a trial with a uid of its own"}
_ORPHAN_S = 600.0  # Age in seconds after which no trial can use its directory any more.
_PREFIX = "sgpu-rehearsal-"


class OfferedLevel(NamedTuple):
    """The strongest isolation level of a node, and the reason for lacking a stronger level, or ""."""

    level: Level
    problem: str = ""


class SubordinateFacts(NamedTuple):
    """Prerequisites of subordinate uids, which a user without root could use."""

    user: str
    missing_programs: tuple[str, ...]
    missing_ranges: tuple[str, ...]  # Files without a range for the user.
    namespace_problem: str  # Reason why the kernel refuses user namespaces, or "".


def subordinate_problem(facts: SubordinateFacts) -> str:
    """Return the missing prerequisite for subordinate uids, or the limit of this version."""
    if facts.missing_programs:
        return f"subordinate uids are not available: {' and '.join(facts.missing_programs)} missing (package uidmap)"
    if facts.missing_ranges:
        files = " and ".join(facts.missing_ranges)
        return f"subordinate uids are not available: {files} without a range for {facts.user} (usermod --add-subuids)"
    if facts.namespace_problem:
        return f"subordinate uids are not available: {facts.namespace_problem}"
    return "this version does not use subordinate uids, although the machine offers them"


def _subordinate_facts() -> SubordinateFacts:
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    files = [path for path in ("/etc/subuid", "/etc/subgid") if not has_range(Path(path), {user, str(uid)})]
    programs = [name for name in ("newuidmap", "newgidmap") if shutil.which(name) is None]
    return SubordinateFacts(user, tuple(programs), tuple(files), namespaces.probe_user_namespace())


def has_range(path: Path, names: Collection[str]) -> bool:
    """Return True if a file of subordinate ids has a range for one of the names of a user."""
    try:
        rows = [line.strip().split(":") for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return False
    return any(len(row) == 3 and row[0] in names and row[2].isdigit() and int(row[2]) > 0 for row in rows)


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


def measure(environ: Mapping[str, str]) -> OfferedLevel:
    """Return the isolation level that this process can give to runs. The call takes about 0.2 s."""
    if sys.platform != "linux":
        return OfferedLevel(NONE, "isolation needs Linux")
    if os.geteuid() != 0:
        missing = subordinate_problem(_subordinate_facts())
        return OfferedLevel(NONE, f"the node's agent does not run as root and has no spawner, and {missing}")
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
