"""A family: the processes of a cluster on one node, in their own pid namespace, which end together.

    node task (namespace of the rank)
      ├─ init       pid 1 of the namespace: reaps orphans; when it dies, the kernel ends the whole namespace
      ├─ ray start, driver, …   each with a /proc of the namespace: `ray stop`, which looks for all processes with
      └─                        Ray's names, finds only this cluster's processes

The end of a process family does not depend on its pid namespace. Every process below the node task dies with the node
task (PR_SET_PDEATHSIG), and the stem ends all processes of the run.

Failure cases: The kernel may refuse a namespace, as it often does in containers. Without a namespace, the node task
becomes the subreaper of its descendants and ends them one by one. A namespace without its own /proc would be worse than
no namespace, because Ray would look up its pids in another namespace's process list. A short-lived child therefore
tries the namespace first. The child has a single thread, but the node task may have more threads, of a library or a
profiler. If the node task has several threads, users other than root get no namespace (EINVAL).
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
    """A group of processes that this class starts, ends together and reaps.

    `refused` is the reason for having no namespace, or "". Raises OSError when no process can start. Raises OSError
    also when this process is only partly in a namespace. A process that is only partly in a namespace must end.
    """

    def __init__(self) -> None:
        self.refused = _probe() or _enter()
        # A child in another namespace cannot check its parent by pid, so every child checks this pidfd.
        self._alive = os.pidfd_open(os.getpid())
        self._own: set[int] = set()
        if self.refused:
            linux.become_subreaper()
        else:
            self._fork(_be_init)

    def fork(self, run: Callable[[], int]) -> int:
        """Start a process of the family. Return its pid in this process's namespace, or raise OSError.

        The new process calls `run` with all descriptors and signal actions of this process. `run` returns the exit
        code.
        """

        def run_with_own_proc() -> int:
            namespaces.mount_proc()
            return run()

        return self._fork(run if self.refused else run_with_own_proc)

    def reap(self) -> float | None:
        """Reap ended orphans. Return the seconds until the next call, or None if none is needed.

        Without a namespace, every orphan of the run becomes a child of this process.
        """
        for pid in linux.children(os.getpid()) if self.refused else ():
            if pid not in self._own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return _REAP_S if self.refused else None

    def end(self) -> None:
        """End and reap all processes of the family within a bounded time.

        The time is bounded, because a device call may not end.
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
    """Reap orphans until another process ends the init process."""
    linux.set_name("sgpu-ray-init")
    linux.leave_descriptors()
    # SIGCHLD stays pending if it arrives between `waitpid` and `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def _probe() -> str:
    """Return "", or the reason why a namespace is not possible. Leave no process behind."""
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
    return "" if text == "ok" else text or "the process that tested the pid namespace ended without an answer"


def _enter() -> str:
    """Put later children of this process into a new namespace. Return the reason of a refusal, or "".

    Raises OSError when this process is only partly in a namespace.
    """
    try:
        namespaces.unshare_namespaces(_CLONE_NEWPID)
    except OSError as error:
        # The error concerns a file of a user namespace that this process has already created.
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
        return "ok" if code == 0 else "cannot mount a /proc for the namespace"
    except OSError as error:
        return error.strerror or str(error)
