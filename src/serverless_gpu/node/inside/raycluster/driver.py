"""The driver: a fork of the node task that imports Ray early, then runs the caller's function.

    node task ── fork ─▶ driver   import ray … waits
              ── {"env": {…}} ─▶  the function, as in any rank
              ◀── exec enter returned failed ──  passed on to the supervisor by the node task

Its events go through the node task because only that one knows whether Ray died first. The node task ends as the driver
did: the same exit code, the same signal. SIGTERM is the run's, not Ray's: it ends the driver at once, unless the
function has asked whether it is to stop.

Failure cases: Ray cannot be imported (the function's own import says so); the node task dies (so does the driver); the
driver ends before it got its start (the node task sees that).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import types
from collections.abc import Callable, Mapping

from .. import linux, protocol
from ..channel import Channel, pair
from .pid_namespace import Family

# Ray connects by itself at the first task, actor or object, but not when it is asked for what a cluster has. A function
# of `ray_launch` needs no `ray.init()`, whatever it does first.
_ASKED_FIRST = ("available_resources", "cluster_resources", "nodes", "timeline")

_KILLED_S = 1.0  # a process in the middle of a device call may take longer, and is left


class Driver:
    """The process the function runs in.

    `variables` is its environment while it imports Ray, which reads some of it then. `drive` runs the function with a
    way to report, and returns the exit code.
    """

    def __init__(self, family: Family, variables: Mapping[str, str], drive: Callable[[protocol.Report], int]) -> None:
        self.channel, theirs = pair()

        def be() -> int:
            self.channel.close()
            return _be_driver(theirs, variables, drive)

        self.pid = family.fork(be)  # in the node task's namespace
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)  # readable when it has ended

    def begin(self, variables: Mapping[str, str]) -> None:
        """Let it run the function, with some more variables."""
        with contextlib.suppress(OSError):  # it has ended: its watcher reports that
            self.channel.send(protocol.encode({"env": dict(variables)}))

    def hear(self) -> protocol.Message | None:
        """Return its next event, or None when it will say nothing more."""
        try:
            received = self.channel.receive()
        except OSError:
            return None
        return None if received is None else protocol.decode(received[0])

    def has_ended(self) -> bool:
        """Return whether it has ended; it may still be to be reaped."""
        return bool(linux.readable([self.pidfd], 0))

    def end(self, number: int) -> None:
        """Send it a signal, unless it has ended; a reused pid is never signalled."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """End it and wait for that: what it is writing would else be there after what is written next."""
        self.end(signal.SIGKILL)
        linux.readable([self.pidfd], _KILLED_S)

    def reap(self) -> int:
        """Return how it ended, a signal as a negative number; waits for that."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def look(self, number: int) -> None:
        """Pass on a signal by which a rank is asked where it is: its main thread answers."""
        if not self.has_ended():  # before that the pid is its own: it is reaped by this thread only
            with contextlib.suppress(OSError):
                linux.signal_main_thread(self.pid, number)


def _be_driver(channel: Channel, variables: Mapping[str, str], drive: Callable[[protocol.Report], int]) -> int:
    linux.set_name("sgpu-driver")
    os.setpgid(0, 0)  # `os.killpg(0, ...)` in user code reaches the driver's own processes only
    os.environ.clear()
    os.environ.update(variables)
    with contextlib.suppress(Exception):
        ray = importlib.import_module("ray")
        for name in _ASKED_FIRST:  # functions that would otherwise ask for a `ray.init()` first
            if (function := getattr(ray, name, None)) is not None:
                setattr(ray, name, _connected(ray, function))
        # SIGTERM is to a driver what it is to any rank. Ray would have it raise SystemExit, also in a function that has
        # asked whether it is to stop: before `ray.init`, whose handler would take that one's place, or after that, when
        # the later handler calls the one before.
        utilities = importlib.import_module("ray._private.utils")
        if hasattr(utilities, "set_sigterm_handler"):
            vars(utilities)["set_sigterm_handler"] = lambda _handler: None
    received = channel.receive()
    if received is None:
        return 1
    more = protocol.decode(received[0]).get("env")
    os.environ.update(more if isinstance(more, dict) else {})

    def report(event: protocol.Message) -> None:
        with contextlib.suppress(OSError):
            channel.send(protocol.encode({**event, "at": protocol.now_ns()}))

    return drive(report)


def _connected(ray: types.ModuleType, function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def connected(*args: object, **kwargs: object) -> object:
        if not ray.is_initialized():
            ray.init()
        return function(*args, **kwargs)

    return connected
