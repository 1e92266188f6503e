"""What tests with servers, nodes and Ray must not leave behind: processes of their homes, and directories in /tmp.

A port is somebody's: where no process is left, none is listened at. Homes are known by who made them: a test of these
directories, in this process; other sessions on this machine have theirs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from serverless_gpu.engines.ray import ray_machine
from serverless_gpu.node.supervisor.ray_cluster import is_left
from tests.support.local.observe import wait_for

_WATCHED = ("tests/e2e/ray/", "tests/e2e/remote/")
_CLUSTERS = "sgpu-ray-*"
_PLACES = ("server/ray", "ray")
_ENDING_S = 60.0


@contextmanager
def nothing_left() -> Iterator[None]:
    """Require that nothing of the homes made meanwhile is left.

    Raises:
        AssertionError: something is; the text says what.
    """
    homes: list[Path] = []
    clusters = {*Path("/tmp").glob(_CLUSTERS)}
    original = tempfile.mkdtemp

    def noting(*args: str | None, **kwargs: str | None) -> str:
        made = original(*args, **kwargs)
        if os.environ.get("PYTEST_CURRENT_TEST", "").startswith(_WATCHED):
            homes.append(Path(made))
        return made

    tempfile.mkdtemp = noting  # type: ignore[assignment]  # two overloads, for text and for bytes
    try:
        yield
    finally:
        tempfile.mkdtemp = original
    left: list[str] = []

    def gone() -> bool:
        abandoned = [path for path in Path("/tmp").glob(_CLUSTERS) if path not in clusters and is_left(str(path))]
        left[:] = [*_processes(homes), *(f"{path} is there" for path in (*_directories(homes), *abandoned))]
        return not left

    with suppress(AssertionError):
        wait_for(gone, "nothing is left", limit_s=_ENDING_S)
    assert not left, "\n".join(["tests left behind:", *left])


def _directories(homes: list[Path]) -> list[Path]:
    rays = [Path(ray_machine.directory_of(home / place)).parent for home in homes for place in _PLACES]
    return [path for path in (*homes, *rays) if path.exists()]


def _processes(homes: list[Path]) -> list[str]:
    """Return the processes that name one of the homes, in their words or their variables, and where they listen."""
    names = [os.fsencode(home) for home in homes]
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            own = Path("/proc", str(process.pid))
            words = (own / "cmdline").read_bytes()
            if process.pid != os.getpid() and any(name in words + (own / "environ").read_bytes() for name in names):
                ports = sorted({each.laddr.port for each in process.net_connections() if each.status == "LISTEN"})
                line = words.replace(b"\0", b" ").decode(errors="replace")[:160]
                found.append(f"process {process.pid}: {line}" + (f", which listens at {ports}" if ports else ""))
    return found
