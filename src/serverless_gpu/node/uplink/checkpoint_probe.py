"""Finds the newest attempt of a run that saved a checkpoint: evidence that `resume` makes progress.

A short-lived process looks, because a call into a hanging shared file system blocks its thread for good. Failure cases,
each answered with 0, "not known": no answer within a few seconds, an unreadable directory, or too many hanging looks.
The server then counts the attempt as one that saved nothing.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.attempt.history import spec_of
from serverless_gpu.node.attempt.server_attempt import Remote
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.processes.spawn import INSIDE

_KILL_S = 0.2
_STUCK_MAX = 3
_BYTES_MAX = 32
_stuck: list[subprocess.Popen[bytes]] = []


class CheckpointProbe:
    """Looks at the checkpoints of one attempt and of those before it.

    `directory` lies in a home whose configuration names where checkpoints lie; `program` looks, and prints what it
    found.
    """

    def __init__(
        self, directory: Path, remote: Remote, *, program: Path = INSIDE / "checkpoints.py", limit_s: float = 5.0
    ) -> None:
        self._home, self._directory, self._remote = Home(directory.parents[2]), directory, remote
        self._program, self._limit_s = program, limit_s

    def newest(self) -> int:
        """Return the number of the newest attempt that saved something, up to this one; 0 if unknown."""
        spec = spec_of(self._directory)
        if spec is None or not spec.resume:
            return 0
        checkpoints = self._home.checkpoints
        with contextlib.suppress(InvalidValue):
            checkpoints = Path(read_configuration(self._home).checkpoints or checkpoints)
        found = self._ask(checkpoints / self._remote.run_id / str(self._remote.fence))
        return found if 0 < found <= self._remote.fence else 0

    def _ask(self, directory: Path) -> int:
        _stuck[:] = [process for process in _stuck if process.poll() is None]
        if len(_stuck) >= _STUCK_MAX:
            return 0
        argv = [sys.executable, "-I", "-S", str(self._program), str(directory)]
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:
            return 0
        try:
            process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
            _stuck.append(process)  # it may be in the kernel until the file system answers
            if process.stdout is not None:
                process.stdout.close()
            return 0
        assert process.stdout is not None
        with process.stdout as pipe:
            text = pipe.read(_BYTES_MAX).strip()
        return int(text) if text.isdigit() else 0
