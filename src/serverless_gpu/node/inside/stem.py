"""The stem: parent of one attempt's ranks, forked from the zygote, standing by for a supervisor.

    supervisor ◀── channel ──▶ stem ── own channel each ──▶ rank 0 … n-1
                      ▲                                        │
                      └──────────── events ────────────────────┘

It sits in a cgroup of its own from the start (moving there costs 5-20 ms, so it happens while standing by) and is the
sub-reaper of everything its ranks start: a grandchild that double-forked, called `setsid` or emptied its environment
becomes *our* child when its parent dies, and dies with the run. Ranks stand by, too, as many as the last run had: a
fork and the page faults after it cost a rank 5-10 ms. What is missing is forked when the work comes, what is left over
ends.

Failure cases:
- the supervisor dies (end of file): everything below ends at once, then the stem, which removes the directory of the
  run's Ray cluster where there is one;
- a rank dies: said with its wait status, the moment it is reaped;
- the environment it is to be in cannot be mounted: said, then it ends;
- the stem itself dies: ranks follow through PR_SET_PDEATHSIG, their children through the cgroup, which the supervisor
  empties.
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

from . import linux, namespaces, protocol, rank
from .channel import Channel, pair
from .launcher import enter_cgroups
from .raycluster.share import remove_directory

_EMPTYING_TRIES_MAX = 500
_EMPTYING_PAUSE_MS = 10


class _Child(NamedTuple):
    """A forked rank that has not been told yet which one it is."""

    pid: int
    channel: Channel


class _Work(NamedTuple):
    """Message for one rank, and the descriptors for its output."""

    message: protocol.Message
    fds: tuple[int, ...]


def main(channel: Channel, request: protocol.Message, zygote: socket.socket | None = None) -> NoReturn:
    """Stand by, run one attempt, end with it; never returns into the zygote's code.

    `channel` leads to the agent, then to a supervisor. `request` names the cgroups to move into, the ranks to fork
    ahead, and the mounts before that. `zygote` maps the ids of this process's own user namespace; None where it gets
    none.
    """
    code = 1
    try:
        os.setsid()
        if zygote is not None:
            with zygote:
                namespaces.become_member(zygote)
        own = _Stem(channel, enter_cgroups(protocol.strings(request, "cgroups")))
        if own.mount(request.get("mounts")):
            own.serve(protocol.integer(request, "ranks"))
        code = 0
    finally:
        if code and sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


class _Stem:
    def __init__(self, channel: Channel, cgroups: list[str]) -> None:
        self.channel = channel
        self.cgroups = cgroups
        self.ranks: dict[int, int] = {}  # pid → rank
        self.children: list[_Child] = []
        self.work: list[_Work] = []
        self.held: list[int] = []
        self.release = -1
        self.cluster = ""  # the directory of a Ray cluster
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def mount(self, plan: object) -> bool:
        """Put another environment in place of the zygote's, for this process and its forks; report a failure.

        Modules that the zygote has loaded stay: the agent knows that both environments have the same.
        """
        if not isinstance(plan, list) or not plan:
            return True
        try:
            namespaces.enter_mounts(plan)
        except OSError as error:
            self._say({"event": "problem", "detail": f"the environment cannot be mounted: {error}"})
            return False
        importlib.invalidate_caches()  # what was listed there, metadata too, may be another file by now
        return True

    def serve(self, standby: int) -> None:
        linux.set_name("sgpu-stem")
        linux.become_subreaper()
        linux.limit_harm()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        for _ in range(standby):
            self.children.append(self._fork())  # one by one: each child closes its elder siblings' channels
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
                except OSError as error:  # no more processes, or no more descriptors
                    self._say({"event": "problem", "detail": f"a rank could not be started: {error}"})
            case "release":
                if self.release >= 0:
                    os.close(self.release)
                    self.release = -1
            case "signal":
                self._signal(protocol.integer(message, "signal"), message.get("ranks"))
            case "kill":
                if self._empty():
                    self._say({"event": "empty"})
                return False
        return True

    def _start_ranks(self, go: protocol.Message) -> None:
        """Tell every rank who it is; the others of a node wait until its first has entered the function.

        A rank that connects to rank 0's store before it listens is refused and tries again only after half a second.
        """
        while len(self.children) < len(self.work):
            self.children.append(self._fork())  # before the pipes are made: only who is given an end may have it
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
            child.channel.close()  # not needed this time: it reads end of file and ends
        self.children.clear()
        self._say({"event": "forked", "pids": pids})

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
            linux.die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            # A lock descriptor that leaked into a rank would hold a GPU for as long as any of its children lives.
            for fd in (*self.held, self.wake_read, self.wake_write, *(fd for work in self.work for fd in work.fds)):
                os.close(fd)
            for sibling in self.children:
                sibling.channel.close()
            code = rank.main(channel, self.channel)
        finally:
            if code and sys.exc_info()[0] is not None:
                sys.excepthook(*sys.exc_info())
            os._exit(code)

    def _signal(self, number: int, ranks: object) -> None:
        for pid, rank_number in self.ranks.items():  # what is in here has not been reaped: its pid is still its own
            if isinstance(ranks, list) and rank_number in ranks:
                # Stacks are the main thread's to write; that of another thread would be another, or none.
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
                    if child.pid == pid:  # reaped while standing by
                        child.channel.close()
                self.children = [child for child in self.children if child.pid != pid]
                number = self.ranks.pop(pid, None)
                if number is not None:
                    peak = usage.ru_maxrss * 1024
                    event = {"event": "exited", "rank": number, "status": status, "peak": peak, "at": protocol.now_ns()}
                    self._say(event)

    def _empty(self) -> bool:
        """End every descendant and reap it; return whether the kernel says that there is no child left."""
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
        # A supervisor that is gone cannot be told; the closed channel is noticed in the loop.
        with contextlib.suppress(OSError):
            self.channel.send(protocol.encode(event))
