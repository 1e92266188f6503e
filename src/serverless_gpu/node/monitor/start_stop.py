"""Starting, reaching and ending the monitor of a home.

    agent ──want()──▶ connected? ─▶ nothing
                      no ─▶ another process's socket answers? ─▶ connected
                            no ─▶ started, detached; its pipe says when it listens ─▶ connected
                      its end of file ─▶ started again, after longer and longer pauses, if anything runs or is left
                      undelivered

The agent never waits here: a monitor that does not start costs samples and tracking, and nothing of a run.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.model.spec import Tracking
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.base.protocol import Context, original
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.monitor import messages
from serverless_gpu.node.monitor.messages import Peer
from serverless_gpu.node.processes import daemon

_PAUSE_NS = 10**9
_PAUSE_NS_MAX = 60 * 10**9
_START_S = 30.0
END_S = 10.0


class MonitorConnection:
    """The agent's line to the monitor of its home."""

    def __init__(
        self, home: Home, sockets: Path, environ: Mapping[str, str], selector: selectors.BaseSelector, clock: Clock
    ) -> None:
        self._home = home
        self._sockets = sockets
        self._environ = environ
        self._selector = selector
        self._clock = clock
        self._peer: Peer | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd = -1
        self._wanted = _has_undelivered(home)
        self._preparation: messages.Prepare | None = None
        self._pause_ns = _PAUSE_NS
        self._again_ns = 0

    def want(self, prepare: messages.Prepare | None = None) -> None:
        """Have a monitor, soon, and have it prepared for a run that is likely to come."""
        self._wanted = True
        self._preparation = prepare if prepare is not None else self._preparation

    def tend(self, *, busy: bool) -> None:
        """Start it if it is wanted and not there; `busy` wants a lost one back."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if self._peer is not None:
            self._prepare(self._peer)
        elif (self._wanted or busy) and self._ready_fd < 0 and self._clock.boottime_ns() >= self._again_ns:
            self._reach()

    def close(self) -> None:
        """Hang up: without an agent it ends once nothing needs it."""
        if self._peer is not None:
            self._lose(self._peer)

    def _reach(self) -> None:
        if self._connect():
            return
        self._again_ns = self._clock.boottime_ns() + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _PAUSE_NS_MAX)
        try:
            self._process, self._ready_fd = start(self._home, self._sockets, self._environ)
        except OSError:
            return  # no process can start now; tried again after the pause
        self._selector.register(self._ready_fd, selectors.EVENT_READ, self._started)

    def _started(self) -> None:
        """Learn that it listens, or has ended."""
        self._selector.unregister(self._ready_fd)
        os.close(self._ready_fd)
        self._ready_fd = -1
        self._connect()

    def _connect(self) -> bool:
        channel = connect(self._sockets)
        if channel is None:
            return False
        peer = self._peer = Peer(channel)
        self._wanted = False
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(peer))
        self._prepare(peer)
        return True

    def _prepare(self, peer: Peer) -> None:
        prepare, self._preparation = self._preparation, None
        if prepare is not None:
            with contextlib.suppress(OSError):
                peer.send(prepare, passing=True)

    def _hear(self, peer: Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            if peer.receive() is None:
                self._lose(peer)
                return
            self._pause_ns = _PAUSE_NS

    def _lose(self, peer: Peer) -> None:
        self._selector.unregister(peer.channel)
        peer.channel.close()
        self._peer = None
        self._wanted = self._wanted or _has_undelivered(self._home)


def _has_undelivered(home: Home) -> bool:
    """Return whether MLflow still has to hear of an attempt."""
    with contextlib.suppress(OSError):
        return any(name.endswith(".json") for name in os.listdir(home.tracking))
    return False


def preparation(tracker: Tracking | None, context: Context) -> messages.Prepare | None:
    """Return the message that prepares the monitor for a run of this context; None without tracking."""
    if tracker is None:
        return None
    return messages.Prepare(
        tracker=tracker, python=original(context.python), environ=messages.tracking_variables(context.environ)
    )


def start(home: Home, sockets: Path, environ: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a monitor, which detaches itself; it ends where one runs already. Raises OSError.

    Returns the process to reap, and a descriptor that is readable once one listens, or none could.
    """
    ready_read, ready_write = os.pipe()
    arguments = (str(home.root), str(sockets), ready_write)
    module = "serverless_gpu.node.monitor.process"
    try:
        process = daemon.start(module, arguments, log=home.monitor_log, environ=environ, fds=(ready_write,))
    except OSError:
        os.close(ready_read)
        raise
    finally:
        os.close(ready_write)
    return process, ready_read


def connect(sockets: Path) -> Channel | None:
    """Return a connection to the monitor, without blocking; None when none listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(str(messages.monitor_socket(sockets)))
    except OSError:
        sock.close()
        return None
    return Channel(sock)


def ensure(home: Home, environ: Mapping[str, str]) -> Channel:
    """Return a connection to the monitor of a home, after starting it if needed.

    Raises AgentUnavailable when it does not start, StorageError when the sockets' directory cannot be used.
    """
    sockets = home.sockets()
    deadline_ns = SystemClock().boottime_ns() + int(_START_S * 1e9)
    while (channel := connect(sockets)) is None:
        try:
            process, ready_fd = start(home, sockets, environ)
        except OSError as error:
            raise AgentUnavailable(f"the monitor of this node could not be started: {error}") from error
        try:
            if daemon.reap(process, _START_S):
                select.select([ready_fd], [], [], _START_S)
        finally:
            os.close(ready_fd)
        if (channel := connect(sockets)) is not None:
            break
        if SystemClock().boottime_ns() > deadline_ns:
            raise AgentUnavailable(
                f"the monitor of this node did not come up within {_START_S:.0f} s",
                hint=f"what it wrote: {home.monitor_log}",
            )
        select.select([], [], [], 0.05)
    channel.sock.setblocking(True)
    return channel


def stop(home: Home) -> int:
    """End the idle monitors of a home; the others end with the last attempt. Return how many have ended.

    Undelivered writes to MLflow get a few seconds, then the next monitor takes them up. Raises AgentUnavailable.
    """
    count = 0
    for path in home.sockets().glob("monitor-*.lock"):
        note = held_note(path)
        words_of = note.decode("ascii", "replace").split() if note else []
        if words_of and words_of[0].isdigit():
            count += _end(path.with_suffix(".sock"), int(words_of[0]))
    return count


def _end(path: Path, pid: int) -> bool:
    """Ask a monitor to end, and see to it; return False for one that stays because attempts need it."""
    with daemon.opened(pid) as process, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        if process is None:
            return False
        sock.settimeout(END_S)
        limit_s = END_S
        try:
            sock.connect(str(path))
            channel = Channel(sock)
            messages.send(channel, messages.RetireMonitor())
            if messages.receive(channel) is not None:
                return False
        except TimeoutError:
            limit_s = 0
        except OSError:
            pass  # it ends already
        if select.select([process], [], [], limit_s)[0]:
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)  # it is stuck; runs do not notice
        if not select.select([process], [], [], END_S)[0]:
            raise AgentUnavailable(f"the monitor (pid {pid}) does not end, although it was killed")
    return True
