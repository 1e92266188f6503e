"""Starts and ends daemons, which are processes of this package that detach from their starter.

    start ──▶ clean interpreter ──▶ forks and exits (its starter reaps it) ──▶ the daemon holds its lock, and listens
    end   ──▶ SIGTERM ──▶ after a timeout SIGKILL ──▶ its pidfd shows that it has ended

The agent, the monitor, the uplink, and the keepers of MLflow and Ray are daemons. Each daemon holds a lock file that
contains its pid. The environment service has no lock file, because it serves one caller and ends with that caller.

Failure cases: If the Python interpreter cannot start, `start` raises OSError. `reap` kills a started process that does
not detach in time. A daemon may exit while another process ends the daemon. Because a pidfd identifies the daemon, a
later process with the same pid receives no signal. If a daemon survives SIGKILL because it waits in the kernel, `end`
returns False.
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
    """Start `main(*arguments)` of a module as a daemon.

    Return the child process, which the caller must pass to `reap`. Raises OSError. The daemon appends its output to the
    file `log` and inherits `fds` under the same numbers.
    """
    output = open_log(log)
    try:
        return clean_process(module, arguments, fds=fds, log=output, environ=environ)
    finally:
        os.close(output)


def reap(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait until a started process has detached.

    If the process does not detach in time, kill the process and return False.
    """
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


@contextlib.contextmanager
def opened(pid: int) -> Iterator[int | None]:
    """Open a process's pidfd, or yield None if the process has ended.

    A pidfd never refers to a later process with the same pid.
    """
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
    """Send a sequence of signals to a process until the process ends.

    Return True if the process has ended. After each signal, the process has `limit_s` seconds to end.
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
