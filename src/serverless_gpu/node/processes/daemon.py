"""Daemons: our own processes that detach from their starter and outlive it.

    start ──▶ clean interpreter ──▶ forks and ends (its starter reaps it) ──▶ the daemon holds its lock, and listens
    end   ──▶ SIGTERM ──▶ after a while SIGKILL ──▶ its pidfd says that it has ended

The agent, the monitor, the uplink, and the keepers of MLflow and Ray are daemons; each has a lock file with its pid.
The environment service has none: it serves one caller, and ends with it.

Failure cases: the interpreter cannot be started (OSError); it does not detach in time (it is killed); the daemon ends
while it is being ended (a descriptor names it, so no process that gets its pid later is signalled); the daemon survives
SIGKILL because it waits in the kernel (`end` returns False).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from serverless_gpu.node.processes.spawn import clean_process, open_log


def start(
    module: str, arguments: Sequence[object], *, log: Path, environ: Mapping[str, str], fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start `main(*arguments)` of a module, which detaches; return the child to `reap`. Raises OSError.

    What it prints is appended to the file `log`. It inherits `fds` under the same numbers.
    """
    output = open_log(log)
    try:
        return clean_process(module, arguments, fds=fds, log=output, environ=environ)
    finally:
        os.close(output)


def reap(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait until a started process has detached; kill one that does not, and return False."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


@contextlib.contextmanager
def opened(pid: int) -> Iterator[int | None]:
    """Open a descriptor of a process, which names no other one later; None when it has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield process
    finally:
        os.close(process)


def end(pid: int, limit_s: float, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGKILL)) -> bool:
    """Send a process one signal after the other until it has ended; return whether it has.

    After each signal, it has `limit_s` seconds to end.
    """
    with opened(pid) as process:
        if process is None:
            return True
        for number in signals:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
            if select.select([process], [], [], limit_s)[0]:
                return True
    return False
