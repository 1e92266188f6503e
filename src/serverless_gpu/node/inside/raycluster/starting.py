"""Having `ray start` run on this node until Ray is there, and knowing when it is gone.

    node task ── fork, exec ─▶ ray start --block ─┬─ gcs_server   the head's: without it the cluster is lost
                  output: ray-start.log           ├─ raylet       without it this node is
                                                  └─ agents, monitor, …   Ray starts those again, or goes with them

Ray is ready when the raylet's socket is there: the head's services are up by then, and a driver that connects waits
for what is still missing. It is gone when `ray start`, the raylet or the head's gcs_server is: all three are watched by
pidfd, for `ray start --block` looks once a second, and takes a SIGTERM to one of them for a wish.

Failure cases: a port was taken meanwhile (tried again with others, `_TRIES_MAX` times); it ends, or is not ready in
`_READY_S` (both a `StartFailed` with the last lines it wrote).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import select
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .. import linux, protocol
from . import ports as ports_module
from .namespace import Family
from .ports import Ports

OUTPUT_FILE = "ray-start.log"
TOKENS_SINCE = (2, 52)

_TRIES_MAX = 3
_READY_S = 180.0  # the first import of Ray from a slow disk takes most of it
_LOOK_MS = 20
_LAST_BYTES = 4_000
_LAST_LINES = 12
_TAKEN = re.compile(r"address already in use|port \d+ is (already )?(in use|taken|not available)|failed to bind", re.I)
_WATCHED = frozenset({"gcs_server", "raylet"})


class StartFailed(Exception):
    """Ray did not come up on this node; the text says what it wrote last."""


class RayMissing(ModuleNotFoundError):
    """There is no Ray in the user's environment."""


class Engine(NamedTuple):
    """Ray's processes on this node, once they are there.

    Attributes:
        pid: of `ray start`.
        watched: pidfd → name, of everything without which this node's Ray is gone.
        ports: theirs.
        temporary: Ray's directory for sessions.
    """

    pid: int
    watched: Mapping[int, str]
    ports: Ports
    temporary: str

    def gone(self, timeout_s: float = 0.0) -> str:
        """Return the name of what has ended, or "" when nothing has.

        Args:
            timeout_s: how long to wait for that.
        """
        ended, _, _ = select.select(list(self.watched), [], [], timeout_s)
        # `ray start` ends because of another: that one is to be named.
        names = sorted((self.watched[fd] for fd in ended), key=lambda name: name not in _WATCHED)
        return names[0] if names else ""

    def last_words(self) -> str:
        """Return the last lines `ray start` wrote."""
        return last_lines(os.path.join(self.temporary, OUTPUT_FILE))


def ray_version() -> str:
    """Return the version of the Ray in this environment, without importing it.

    Raises:
        RayMissing: there is none.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.util.find_spec("ray") is not None:
            return importlib.metadata.version("ray")
    raise RayMissing("Ray is not installed in the environment of the run: pip install 'ray[default]'", name="ray")


def can_serve_clients() -> bool:
    """Return whether Ray serves `ray://` connections here: it does where gRPC's Python package is."""
    return importlib.util.find_spec("grpc") is not None


def knows_tokens(version: str) -> bool:
    """Return whether a Ray of this version can refuse who does not know a cluster's token."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2]) >= TOKENS_SINCE


def start(
    family: Family,
    directory: str,
    variables: Callable[[Ports], Mapping[str, str]],
    arguments: Callable[[Ports, str], list[str]],
    stop: Callable[[], bool],
) -> Engine | None:
    """Start Ray on this node and return when it is ready; None when it is to stop before.

    Args:
        family: who the processes belong to.
        directory: a private one; each try has a directory of its own in it.
        variables: the whole environment, for ports.
        arguments: those of `ray start`, for ports and a directory of sessions.
        stop: whether to give up.

    Raises:
        StartFailed: it did not come up.
    """
    for number in range(1, _TRIES_MAX + 1):
        ports, temporary = ports_module.find(), os.path.join(directory, str(number))
        os.mkdir(temporary, 0o700)
        output = os.path.join(temporary, OUTPUT_FILE)
        argv = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *arguments(ports, temporary)]
        pid = family.fork(_program(argv, dict(variables(ports)), output))
        pidfd = os.pidfd_open(pid)
        problem = _wait(pidfd, temporary, stop)
        if problem is None:
            return None
        if not problem:
            return Engine(pid, {pidfd: "ray start", **_watch(pid)}, ports, temporary)
        os.close(pidfd)
        told = last_lines(output)
        if number == _TRIES_MAX or not _TAKEN.search(told):
            raise StartFailed(f"{problem}\n{told}" if told else problem)
    return None


def last_lines(path: str) -> str:
    """Return the last lines of a file, "" where there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-_LAST_LINES:])
    return ""


def _wait(pidfd: int, temporary: str, stop: Callable[[], bool]) -> str | None:
    """Return "" when Ray is ready, what is wrong, or None when it is to stop."""
    socket = os.path.join(temporary, "session_latest", "sockets", "raylet")
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    until = protocol.now_ns() + int(_READY_S * 1e9)
    while protocol.now_ns() < until:
        if stop():
            return None
        if poll.poll(_LOOK_MS):
            return "`ray start` ended before Ray was ready"
        if os.path.exists(socket):
            return ""
    return f"Ray was not ready after {_READY_S:.0f} s"


def _watch(pid: int) -> dict[int, str]:
    """Return a pidfd for each of the processes that `ray start` cannot be without."""
    found: dict[int, str] = {}
    for child in linux.descendants(pid):
        with contextlib.suppress(OSError), open(f"/proc/{child}/comm", encoding="utf-8") as file:
            name = file.read().strip()
            if name in _WATCHED:
                found[os.pidfd_open(child)] = name
    return found


def _program(argv: list[str], variables: dict[str, str], output: str) -> Callable[[], int]:
    def become() -> int:
        os.setpgid(0, 0)  # what is sent to the driver's group is not for Ray
        null = os.open(os.devnull, os.O_RDONLY)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(fd, target)
        os.execve(argv[0], argv, variables)

    return become
