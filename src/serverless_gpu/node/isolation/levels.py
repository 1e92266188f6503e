"""Measures the isolation level that this node can offer.

The measurement creates the same sandbox and attempt as a run. A machine's settings do not show whether a container, a
security module or an old kernel refuses a step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.isolation import NONE, SANDBOX, Level
from serverless_gpu.node.inside import seal
from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.isolation.principals import RANGE, uid_range
from serverless_gpu.node.processes.process_tree import find_cgroup_root
from serverless_gpu.node.processes.spawn import clean_variables, load_inside

_REHEARSAL_S = 20.0


class OfferedLevel(NamedTuple):
    """The strongest isolation level of a node, and the reason for lacking a stronger level, or ""."""

    level: Level
    problem: str = ""


def measure(environ: Mapping[str, str]) -> OfferedLevel:
    """Return the isolation level that this process can give to runs. The call takes about 0.1 s."""
    problem = _problem(environ)
    return OfferedLevel(NONE, problem) if problem else OfferedLevel(SANDBOX)


def _problem(environ: Mapping[str, str]) -> str:
    if sys.platform != "linux":
        return "sandboxes need Linux"
    if os.geteuid() != 0:
        return "the node's agent does not run as root"
    if why := seal.problem():
        return why
    cgroups = find_cgroup_root(f"serverless_gpu-rehearsal-{os.getpid()}", environ)
    try:
        if cgroups.path is None:
            return cgroups.problem
    finally:
        cgroups.close()
    try:
        return _rehearse(uid_range(environ.get(RANGE, ""))[-1], environ)
    except (OSError, IsolationUnavailable) as error:
        return f"a trial sandbox cannot be made: {error}"


def _rehearse(uid: int, environ: Mapping[str, str]) -> str:
    """Create a sandbox of a uid without an owner. Return the reason for a failure, or "". Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="sgpu-rehearsal-") as place:
        at, home = Path(place, "root"), Path(place, "home")
        at.mkdir()
        home.mkdir()
        os.chown(home, uid, uid)
        view = View(uid=uid, at=str(at), home=str(home), python=sys.executable, shown=[], devices=[])
        program = f"{load_inside()}from _sgpu_inside import sandbox\nsandbox.rehearse(sandbox.View(*{tuple(view)!r}))\n"
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
            return f"a trial sandbox did not end within {_REHEARSAL_S:.0f} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"a trial sandbox failed: {lines[-1] if lines else f'exit code {done.returncode}'}"
