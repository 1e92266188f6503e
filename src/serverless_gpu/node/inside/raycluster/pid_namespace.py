"""A family: a Ray cluster's processes on one node, which end together in their own pid namespace.

    node task (namespace of the rank)
      ├─ init       pid 1 of the namespace: reaps orphans; when it dies, the kernel ends the whole namespace
      ├─ ray start, driver, …   each with a /proc of the namespace: `ray stop`, which looks for all processes with
      └─                        Ray's names, finds only this cluster's processes

A process family ends completely even without a pid namespace. Every process below the node task dies with the node task
(PR_SET_PDEATHSIG). The stem ends all processes of the run.

Failure cases: The kernel may refuse to create a pid namespace, which often happens in containers. Without a pid
namespace, the node task becomes the subreaper of its descendants and ends them one by one. A pid namespace without its
own /proc is unusable, because Ray would look up its pids in another namespace's process list. A short-lived child
therefore tries to create the pid namespace first. Unlike the child, the node task may have several threads, which a
library or profiler has started. If the node task has several threads, the kernel refuses a pid namespace to users other
than root (EINVAL).
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
    """A group of processes that this class starts, ends and reaps together.

    `refused` is the reason for the missing pid namespace, or "". Raises OSError if no process can start. Raises OSError
    if this process has entered only a part of a namespace. After a partial entry into a namespace, this process must
    end.
    """

    def __init__(self) -> None:
        self.refused = _probe() or _enter()
        # Every child checks this pidfd, because a child in another namespace cannot check its parent by pid.
        self._alive = os.pidfd_open(os.getpid())
        self._own: set[int] = set()
        if self.refused:
            linux.become_subreaper()
        else:
            self._fork(_be_init)

    def fork(self, run: Callable[[], int]) -> int:
        """Start a process of the family.

        Return the new process's pid in this process's namespace. Raises OSError. The new process calls `run` with all
        descriptors and signal actions of this process. The callback `run` returns the exit code.
        """

        def run_with_own_proc() -> int:
            namespaces.mount_proc()
            return run()

        return self._fork(run if self.refused else run_with_own_proc)

    def reap(self) -> float | None:
        """Reap ended orphans.

        Return the seconds until `reap` must be called again, or None if no further call is needed. Without a pid
        namespace, every orphan of the run becomes a child of this process.
        """
        for pid in linux.children(os.getpid()) if self.refused else ():
            if pid not in self._own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return _REAP_S if self.refused else None

    def end(self) -> None:
        """End and reap all processes of the family within a time limit.

        The time limit exists because a device call may hang.
        """
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
    """Reap orphans until another process kills the init process."""
    linux.set_name("sgpu-ray-init")
    linux.leave_descriptors()
    # A SIGCHLD that arrives between `waitpid` and `sigwait` stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def _probe() -> str:
    """Return "", or the reason for which the kernel refuses a pid namespace.

    The function leaves no process behind.
    """
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
    return "" if text == "ok" else text or "the process that tested the pid namespace ended without reporting a result"


def _enter() -> str:
    """Create a pid namespace for later children of this process. Return the reason of a refusal, or "".

    Raises OSError if this process has entered only a part of a namespace.
    """
    try:
        namespaces.unshare_namespaces(_CLONE_NEWPID)
    except OSError as error:
        # An error with a file name concerns a user namespace that this process has already entered.
        if error.filename is not None:
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
        return "ok" if code == 0 else "cannot mount /proc in the pid namespace"
    except OSError as error:
        return error.strerror or str(error)
