"""Starts, contacts and ends an installation's monitor.

    agent ──want()──▶ connected? ─▶ nothing
                      no ─▶ the socket of a running monitor answers? ─▶ connected
                            no ─▶ start a detached monitor; its pipe shows when it listens ─▶ connected
                      its end of file ─▶ start it again, with exponential backoff, if a run or undelivered data
                      needs it

The agent never waits for the monitor. Without a monitor, runs continue but lose samples and tracking.
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
    """The agent's connection to the installation's monitor."""

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
        """Request a running monitor that prepares for a likely run."""
        self._wanted = True
        self._preparation = prepare if prepare is not None else self._preparation

    def tend(self, *, busy: bool) -> None:
        """Start the monitor if it is requested but not running. With `busy`, also restart a lost monitor."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if self._peer is not None:
            self._prepare(self._peer)
        elif (self._wanted or busy) and self._ready_fd < 0 and self._clock.boottime_ns() >= self._again_ns:
            self._reach()

    def close(self) -> None:
        """Disconnect. Without an agent, the monitor exits once no client needs the monitor."""
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
            return  # If no monitor process can start, the agent retries after a pause.
        self._selector.register(self._ready_fd, selectors.EVENT_READ, self._started)

    def _started(self) -> None:
        """Handle the end of the start pipe, when the monitor listens or has ended."""
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
    """Return True if an attempt has undelivered data for MLflow."""
    with contextlib.suppress(OSError):
        return any(name.endswith(".json") for name in os.listdir(home.tracking))
    return False


def preparation(tracker: Tracking | None, context: Context) -> messages.Prepare | None:
    """Return the message that prepares the monitor for a run in this context; None without tracking."""
    if tracker is None:
        return None
    return messages.Prepare(
        tracker=tracker, python=original(context.python), environ=messages.tracking_variables(context.environ)
    )


def start(home: Home, sockets: Path, environ: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a monitor, which detaches and exits if another monitor runs. Raises OSError.

    Return the process to reap, and a descriptor that becomes readable once a monitor listens or has failed.
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
    """Return a non-blocking connection to the monitor; None if no monitor listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(str(messages.monitor_socket(sockets)))
    except OSError:
        sock.close()
        return None
    return Channel(sock)


def ensure(home: Home, environ: Mapping[str, str]) -> Channel:
    """Return a connection to the installation's monitor. The function starts the monitor if needed.

    Raises AgentUnavailable if the monitor does not start. Raises StorageError if the socket directory is not usable.
    """
    sockets = home.sockets()
    deadline_ns = SystemClock().boottime_ns() + int(_START_S * 1e9)
    while (channel := connect(sockets)) is None:
        try:
            process, ready_fd = start(home, sockets, environ)
        except OSError as error:
            raise AgentUnavailable(f"could not start the monitor of this node: {error}") from error
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
                hint=f"see the monitor's log {home.monitor_log}",
            )
        select.select([], [], [], 0.05)
    channel.sock.setblocking(True)
    return channel


def stop(home: Home) -> int:
    """End the installation's idle monitors and return the number of ended monitors.

    Busy monitors exit after their last attempt. A monitor has a few seconds to send undelivered data to MLflow. The
    next monitor delivers the remaining data. Raises AgentUnavailable.
    """
    count = 0
    for path in home.sockets().glob("monitor-*.lock"):
        note = held_note(path)
        words_of = note.decode("ascii", "replace").split() if note else []
        if words_of and words_of[0].isdigit():
            count += _end(path.with_suffix(".sock"), int(words_of[0]))
    return count


def _end(path: Path, pid: int) -> bool:
    """Make a monitor exit, with SIGKILL if necessary. Return False if attempts still need the monitor."""
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
            pass  # The monitor is already exiting.
        if select.select([process], [], [], limit_s)[0]:
            return True
        with contextlib.suppress(ProcessLookupError):
            # The monitor hangs. SIGKILL is safe, because runs do not depend on the monitor.
            signal.pidfd_send_signal(process, signal.SIGKILL)
        if not select.select([process], [], [], END_S)[0]:
            raise AgentUnavailable(f"the monitor (pid {pid}) did not end after it was killed")
    return True
