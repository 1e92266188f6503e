"""A real second process for tests of locks: it runs a script and is talked to line by line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import serverless_gpu

SOURCE = Path(serverless_gpu.__path__[0]).parent

PREAMBLE = """
import os, socket, sys
from pathlib import Path
from serverless_gpu.node.devices.locks import Busy, DeviceLocks, LockHolder, LockedDevices, Ticket
directory = Path(sys.argv[1])
locks = DeviceLocks(directory)
me = LockHolder(uuid="", run_id="run-other", user="bob", pid=os.getpid(), since_wall_ns=7)
def say(text):
    print(text, flush=True)
"""


class Other:
    """A second process; it runs until its standard input closes, or until it is killed."""

    def __init__(self, script: str, *arguments: object, fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()


@contextlib.contextmanager
def other(script: str, *arguments: object, fds: tuple[int, ...] = ()) -> Iterator[Other]:
    process = Other(script, *arguments, fds=fds)
    try:
        yield process
    finally:
        if process.process.returncode is None:
            process.kill()
