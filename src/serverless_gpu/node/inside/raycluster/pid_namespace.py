"""A cluster's processes on one node: a family in a pid namespace of its own, which ends at once.

    node task (namespace of the rank)
      ├─ init       pid 1 in there: reaps; when it dies the kernel ends everything in there
      ├─ ray start, driver, …   each with a /proc of the namespace: `ray stop`, which looks for everything that is
      └─                        called like Ray, finds this cluster's processes and no other's

The end does not depend on it: everything below the node task dies with it (PR_SET_PDEATHSIG), and the stem ends all of
the run.

Failure cases: the kernel refuses (containers often do): without a namespace, the node task becomes the sub-reaper of
all it starts, and ends its descendants one by one. A namespace without a /proc of its own would be worse than none: Ray
would look up its own pids in a foreign list. So a process that goes away tries it first. That one has a single thread,
and this one may have more, of a library or a profiler: other users than root get no namespace then (EINVAL, nothing has
changed).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from .. import linux, namespaces

_CLONE_NEWPID = 0x20000000
_REAP_S = 10.0
_END_TRIES_MAX = 1_000
_END_PAUSE_MS = 10
_REASON_BYTES_MAX = 1_024


class Family:
    """Processes that start here, end together, and are reaped here; `refused`: why without namespace.

    Raises OSError when no process can start, or this one is half in a namespace: it must end.
    """

    def __init__(self) -> None:
        self.refused = _probe() or _enter()
        self._alive = os.pidfd_open(os.getpid())  # a parent in another namespace has no number a child could ask for
        self._own: set[int] = set()
        if self.refused:
            linux.become_subreaper()
        else:
            self._fork(_be_init)

    def fork(self, run: Callable[[], int]) -> int:
        """Start a process of the family and return its pid in this process's namespace; raises OSError.

        `run` is called there, with every descriptor and signal action of this process; it returns the exit code.
        """

        def run_with_own_proc() -> int:
            namespaces.mount_proc()
            return run()

        return self._fork(run if self.refused else run_with_own_proc)

    def reap(self) -> float | None:
        """Reap who ended and was not forked here; return in how many seconds to look again, None for never.

        Without a namespace every process that lost its parent comes to this one, for as long as the run lasts.
        """
        for pid in linux.children(os.getpid()) if self.refused else ():
            if pid not in self._own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return _REAP_S if self.refused else None

    def end(self) -> None:
        """End and reap every process of the family; bounded, as one in the middle of a device call may stay."""
        pause = select.poll()
        for _ in range(_END_TRIES_MAX):
            linux.kill_descendants(os.getpid())
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            pause.poll(_END_PAUSE_MS)

    def _fork(self, run: Callable[[], int]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                linux.die_with(self._alive)
                os.close(self._alive)
                code = run()
            finally:
                if sys.exc_info()[0] is not None:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
        self._own.add(pid)
        return pid


def _be_init() -> NoReturn:
    """Reap what lost its parent, until this process is ended."""
    linux.set_name("sgpu-ray-init")
    linux.leave_descriptors()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # it stays pending when it comes between the two calls
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def _probe() -> str:
    """Return why there can be no namespace, or ""; nothing remains of the try."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, _try_out().encode()[:_REASON_BYTES_MAX])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        text = answer.read(_REASON_BYTES_MAX).decode(errors="replace")
    os.waitpid(pid, 0)
    return "" if text == "ok" else text or "the process that tried was ended"


def _enter() -> str:
    """Have the children of this process live in a namespace; return why they cannot, or "".

    Raises OSError when this process is half in.
    """
    try:
        namespaces.unshare_namespaces(_CLONE_NEWPID)
    except OSError as error:
        if error.filename is not None:  # a file of a user namespace that was made
            raise
        return error.strerror or str(error)
    return ""


def _try_out() -> str:
    try:
        namespaces.unshare_namespaces(_CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(OSError):
                namespaces.mount_proc()
                code = 0 if os.readlink("/proc/self") == "1" else 1
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return "ok" if code == 0 else "a /proc of its own cannot be mounted"
    except OSError as error:
        return error.strerror or str(error)
