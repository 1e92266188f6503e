"""The parent process of one attempt's ranks, which the zygote forks before a supervisor needs it.

    supervisor ◀── channel ──▶ stem ── one channel each ──▶ rank 0 … n-1
                      ▲                                        │
                      └──────────── events ────────────────────┘

The stem enters its cgroup during standby, because entering a cgroup takes 5-20 ms. The stem is the subreaper of its
ranks. Every orphaned descendant therefore becomes a child of the stem, even after a double fork or `setsid`. Orphaned
descendants therefore end with the run. The stem also forks as many standby ranks as the previous run had. Without
standby ranks, the fork and its page faults would cost each rank 5-10 ms. When the supervisor starts an attempt, the
stem forks missing ranks and ends surplus ranks.

Failure cases:

* If the supervisor dies, the stem reads end of file and ends all descendants. Before it exits, the stem removes the
  directory of the run's Ray cluster.
* If a rank dies, the stem reports the rank's wait status as soon as it reaps the rank.
* If the stem cannot mount the environment, the stem reports the problem and exits.
* If the stem dies, the kernel ends the ranks (PR_SET_PDEATHSIG). The supervisor ends the ranks' child processes by
  emptying the cgroup.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
from typing import NamedTuple, NoReturn

from . import endpoint, linux, namespaces, protocol, rank, sandbox, seal
from .channel import Channel, pair
from .launcher import enter_cgroups, join_cgroups
from .raycluster.share import remove_directory
from .resource_limits import limit_resources

_EMPTYING_TRIES_MAX = 500
_EMPTYING_PAUSE_MS = 10


class _Child(NamedTuple):
    """A forked standby rank without a rank number."""

    pid: int
    channel: Channel


class _Work(NamedTuple):
    """The supervisor's message for one rank, with the descriptors for the rank's output."""

    message: protocol.Message
    fds: tuple[int, ...]


def main(
    channel: Channel, request: protocol.Message, zygote: socket.socket | None = None, fds: tuple[int, ...] = ()
) -> NoReturn:
    """Stand by, run one attempt and end. Never return into the zygote's code.

    `channel` connects the stem first to the agent and later to a supervisor. `request` names the cgroups to enter, the
    number of ranks to fork in advance and the mounts. `zygote` is a socket to the zygote, which maps the ids of the
    stem's own user namespace. A `zygote` of None means that the stem gets no user namespace. If the request contains
    ``isolation``, `fds` contains descriptors of cgroups, environments and locks, in this order.
    """
    code = 1
    try:
        os.setsid()
        if zygote is not None:
            with zygote:
                namespaces.become_member(zygote)
        linux.limit_harm()  # A sealed process cannot change its own settings.
        isolation = request.get("isolation")
        own = _Stem(channel, isolated=isinstance(isolation, dict))
        cgroups = protocol.strings(request, "cgroups")
        if isinstance(isolation, dict):
            own.cgroups, ready = cgroups, own.isolate(isolation, list(fds), len(cgroups))
        else:
            own.cgroups, ready = enter_cgroups(cgroups), own.mount(request.get("mounts"))
        if ready:
            own.serve(protocol.integer(request, "ranks"))
        code = 0
    finally:
        if code and sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


class _Stem:
    def __init__(self, channel: Channel, *, isolated: bool) -> None:
        self.channel = channel
        self.isolated = isolated
        self.cgroups: list[str] = []
        self.ranks: dict[int, int] = {}  # Rank numbers by pid.
        self.children: list[_Child] = []
        self.work: list[_Work] = []
        self.held: list[int] = []
        self.release = -1
        self.cluster = ""  # Directory of the run's Ray cluster, or "".
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def mount(self, plan: object) -> bool:
        """Mount another environment in place of the zygote's, for this process and its child processes.

        Report a failure.
        """
        if not isinstance(plan, list) or not plan:
            return True
        try:
            namespaces.enter_mounts(plan)
        except OSError as error:
            self._say({"event": "problem", "detail": f"the stem cannot mount the environment: {error}"})
            return False
        # Python may have cached directory listings and metadata of the previous environment.
        importlib.invalidate_caches()
        return True

    def isolate(self, wanted: protocol.Message, fds: list[int], cgroups: int) -> bool:
        """Enter the cgroups and the namespaces of the attempt, and give up all rights. Report a failure."""
        join_cgroups(fds[:cgroups])
        limit_resources(protocol.integer(wanted, "tasks_max"))
        if wanted.get("level") != protocol.SANDBOX:
            seal.set_dumpable(value=False)  # The zygote has no rights, so the stem has none to give up.
            return True
        trees = protocol.strings(wanted, "trees")
        size = protocol.integer(wanted, "memory")
        try:
            sandbox.enter_attempt(size, size, zip(fds[cgroups:], trees, strict=False))
        except OSError as error:
            self._say({"event": "problem", "detail": f"the sandbox of the attempt cannot be made: {error}"})
            return False
        importlib.invalidate_caches()
        return True

    def serve(self, standby: int) -> None:
        linux.set_name("sgpu-stem")
        linux.become_subreaper()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        for _ in range(standby):
            # Fork one rank at a time, because each rank closes the channels of the ranks forked before it.
            self.children.append(self._fork())
        self._say({"event": "standby", "version": protocol.VERSION, "pid": os.getpid(), "cgroups": self.cgroups})
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.wake_read, select.POLLIN)
        alive = True
        while alive:
            for fd, _ in poll.poll():
                if fd == self.wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_read, 4096)
                    self._reap()
                else:
                    alive = self._obey()

    def _obey(self) -> bool:
        received = self.channel.receive()
        if received is None:
            self._empty()
            remove_directory(self.cluster)
            return False
        message, fds = protocol.decode(received[0]), received[1]
        match message.get("op"):
            case "rank":
                self.work.append(_Work(message, fds))
            case "hold":
                self.held += fds
            case "go":
                share = message.get("ray")
                self.cluster = protocol.text(share, "directory") if isinstance(share, dict) else ""
                try:
                    self._start_ranks(message)
                except OSError as error:  # The kernel has reached its limit of processes or descriptors.
                    self._say({"event": "problem", "detail": f"the stem could not start a rank: {error}"})
            case "release":
                if self.release >= 0:
                    os.close(self.release)
                    self.release = -1
            case "open":
                self._open_endpoint(message, fds)
            case "signal":
                self._signal(protocol.integer(message, "signal"), message.get("ranks"))
            case "kill":
                if self._empty():
                    self._say({"event": "empty"})
                return False
        return True

    def _start_ranks(self, go: protocol.Message) -> None:
        """Send each rank its rank number.

        The node's other ranks wait until the first rank has entered the function.
        """
        while len(self.children) < len(self.work):
            # Fork before creating the pipes, so that no rank inherits a pipe end intended for another rank.
            self.children.append(self._fork())
        gate_read, gate_write = os.pipe2(os.O_CLOEXEC)
        release_read, self.release = os.pipe2(os.O_CLOEXEC)
        pids: dict[str, int] = {}
        for number, work in enumerate(self.work):
            child = self.children.pop()
            gate = gate_write if number == 0 else gate_read
            child.channel.send(protocol.encode({**go, **work.message}), (*work.fds, gate, release_read))
            child.channel.close()
            self.ranks[child.pid] = protocol.integer(work.message, "rank")
            pids[str(self.ranks[child.pid])] = child.pid
        for fd in (gate_read, gate_write, release_read, *(fd for work in self.work for fd in work.fds)):
            os.close(fd)
        for child in self.children:
            child.channel.close()  # A surplus rank reads end of file and exits.
        self.children.clear()
        self.work.clear()
        self._say({"event": "forked", "pids": pids})

    def _open_endpoint(self, message: protocol.Message, fds: tuple[int, ...]) -> None:
        """Fork the end of a connection into the attempt."""
        sock = socket.socket(fileno=fds[0])
        try:
            parent = os.getpid()
            if os.fork() == 0:
                self._become_endpoint(message, sock, parent)
        except OSError as error:  # The kernel has reached its limit of processes.
            with contextlib.suppress(OSError):
                sock.sendall(f"-the run cannot start another process: {error.strerror}\n".encode())
        finally:
            sock.close()

    def _become_endpoint(self, message: protocol.Message, sock: socket.socket, parent: int) -> NoReturn:
        code = 1
        try:
            self._leave_stem(parent)
            self.channel.close()
            if self.release >= 0:
                os.close(self.release)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            code = endpoint.main(message, sock)
        finally:
            if code and sys.exc_info()[0] is not None:
                sys.excepthook(*sys.exc_info())
            os._exit(code)

    def _leave_stem(self, parent: int) -> None:
        """Give up what a fork of the stem has inherited and must not keep."""
        if self.isolated:
            seal.set_dumpable(value=True)  # Debuggers in the attempt may trace its other processes, but not the stem.
        linux.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        # If a child inherited a lock descriptor, the GPU would remain locked until the child's last child ends.
        for fd in (*self.held, self.wake_read, self.wake_write, *(fd for work in self.work for fd in work.fds)):
            os.close(fd)
        for sibling in self.children:
            sibling.channel.close()

    def _fork(self) -> _Child:
        ours, theirs = pair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._become_rank(theirs, parent)
        theirs.close()
        return _Child(pid, ours)

    def _become_rank(self, channel: Channel, parent: int) -> NoReturn:
        code = 1
        try:
            self._leave_stem(parent)
            code = rank.main(channel, self.channel)
        finally:
            if code and sys.exc_info()[0] is not None:
                sys.excepthook(*sys.exc_info())
            os._exit(code)

    def _signal(self, number: int, ranks: object) -> None:
        # The kernel has not reused the pids in `self.ranks`, because the stem has not reaped the ranks yet.
        for pid, rank_number in self.ranks.items():
            if isinstance(ranks, list) and rank_number in ranks:
                # Only the main thread of a rank answers a stack signal with the right stack. Another thread of the rank
                # would write its own stack or no stack.
                send = linux.signal_main_thread if number in protocol.LOOK_SIGNALS else os.kill
                with contextlib.suppress(ProcessLookupError):
                    send(pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if not pid:
                    return
                for child in self.children:
                    if child.pid == pid:  # The standby rank ended before the stem sent a rank number.
                        child.channel.close()
                self.children = [child for child in self.children if child.pid != pid]
                number = self.ranks.pop(pid, None)
                if number is not None:
                    peak = usage.ru_maxrss * 1024
                    event = {"event": "exited", "rank": number, "status": status, "peak": peak, "at": protocol.now_ns()}
                    self._say(event)

    def _empty(self) -> bool:
        """End and reap every descendant of the stem. Return True if the kernel reports that no child remains."""
        pause = select.poll()
        for _ in range(_EMPTYING_TRIES_MAX):
            linux.kill_descendants(os.getpid())
            self._reap()
            try:
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    pause.poll(_EMPTYING_PAUSE_MS)
            except ChildProcessError:
                return True
        return False

    def _say(self, event: protocol.Message) -> None:
        # If the supervisor has ended, the main loop detects the closed channel.
        with contextlib.suppress(OSError):
            self.channel.send(protocol.encode(event))
