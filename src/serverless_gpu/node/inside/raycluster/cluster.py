"""Membership of the run's Ray cluster: node 0's knowledge of all nodes, and the part of every other node.

    RunCluster, node 0
      this node: ray start, gcs_server, raylet ── pidfds ──┐
      node 1, 2, … ── link: "joined", "lost", end of file ──┴─▶ gone(): a sentence that names the node and what ended

    take_part, node n                                       node task of node 0
      ├─ link ── hears where Ray's head is ◀──────────────    …
      ├─ ray start --block --address=… ──▶ joined ────────▶   the driver starts when all have
      └─ stays ◀── done ──────────────────────────────────    the driver has ended

Failure cases:
- several are lost: the first is reported, because the others follow from it;
- a stranger connects to the link: `link.py` refuses it, and nothing is gone;
- Ray does not start on node n, or ends: node 0 hears it in a sentence, and it is this node's failure, too;
- node 0's task is gone, or never came: this node's failure, which names node 0's machine;
- Ray ends on node n because the head's does while "done" is on its way: waited for, `_SETTLE_S`;
- SIGTERM: this node's Ray is ended, and the node task ends of the signal.
"""

from __future__ import annotations

import signal
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .. import linux
from . import link, ray_start
from .pid_namespace import Family
from .ray_start import Ports, RayProcesses
from .share import ClusterShare


class RunCluster:
    """Knowledge of node 0 about all nodes of the run's cluster; `kept` will hold this node's logs."""

    def __init__(self, share: ClusterShare, kept: str) -> None:
        self._share = share
        self._kept = kept
        self._engine: RayProcesses | None = None
        self._head: link.HeadLink | None = None
        self._offers = [share]
        self._lost = ""

    def listen(self) -> None:
        """Let the other nodes join, if any; call it after forking the driver. OSError: the address is taken."""
        share = self._share
        if share.num_nodes > 1:
            self._head = link.HeadLink(share.head, share.secret, share.num_nodes, share.host)

    def begin(self, engine: RayProcesses, address: str) -> None:
        """Watch this node's Ray, which is there, and let the other nodes join it."""
        self._engine = engine
        if self._head is not None:
            self._head.tell(address)

    def missing(self) -> list[int]:
        """Return the numbers of the nodes that have not joined."""
        return [] if self._head is None else self._head.missing()

    def shares(self) -> list[ClusterShare]:
        """Return the shares of all nodes that have joined, this one's first."""
        return self._offers

    def fds(self) -> list[int]:
        """Return what becomes readable when `gone` is to be asked."""
        sockets = [] if self._head is None else [sock.fileno() for sock in self._head.sockets()]
        return [*(self._engine.watched if self._engine is not None else ()), *sockets]

    def gone(self, timeout_s: float = 0.0) -> str:
        """Return a sentence about the first loss, or "", after waiting for it for `timeout_s`."""
        until = time.monotonic() + timeout_s
        while not (lost := self._look()) and (left_s := until - time.monotonic()) > 0:
            linux.readable(self.fds(), left_s)
        return lost

    def done(self) -> None:
        """Tell the other nodes that the driver has ended; before this node's Ray does."""
        if self._head is not None:
            self._head.done()
            self._head = None

    def leave(self) -> None:
        """Close this process's copies of the connections, and say nothing: for one that was forked meanwhile."""
        if self._head is not None:
            self._head.close()

    def _look(self) -> str:
        if not self._lost and self._engine is not None and (name := self._engine.gone()):
            self._lost = lost_engine(self._share, self._engine, name, self._kept)
        for word in [] if self._head is None else self._head.take(time.monotonic()):
            if word.kind == link.JOINED:
                self._offers.append(self._share._replace(devices=word.devices, cpus=word.cpus))
            elif word.kind == link.LOST:
                self._lost = self._lost or word.text
        return self._lost


def lost_engine(share: ClusterShare, engine: RayProcesses, name: str, kept: str) -> str:
    """Return the sentence about a node whose Ray is gone.

    `name` is the process that has ended, `kept` the place of the logs.
    """
    text = f"Ray on node {share.host} is gone: its {name} ended while the run needed it. Its logs: {kept}"
    words = engine.last_words()
    return f"{text}\n{words}" if words else text


_REACH_S = 300.0  # node 0's machine may come later, and imports Ray from a slow disk before it can say anything
_LOOK_S = 0.1  # between two tries to reach node 0
_SETTLE_S = 1.0


class _Stopped(BaseException):
    """SIGTERM came."""


class TaskNode(NamedTuple):
    """A node task's view of its node; `kept` will hold the logs of this node's Ray."""

    share: ClusterShare
    family: Family
    environment: Mapping[str, str]
    kept: str


def until_stopped(act: Callable[[], str]) -> str | None:
    """Return what `act` returns, or None when SIGTERM interrupted it with a `BaseException`.

    From then on SIGTERM is ignored, because the rest is bounded. It is to be expected: when one node reports a lost
    cluster, the others get SIGTERM while they report it, too.
    """
    try:
        signal.signal(signal.SIGTERM, _on_sigterm)
        try:
            return act()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Stopped:
        return None


def take_part(node: TaskNode, say: Callable[[str], None], record: Callable[[Ports, Callable[[], None]], None]) -> str:
    """Run this node's part of the cluster until the driver has ended; return a sentence of a loss, or "".

    `record` has Ray's metrics recorded once it is up; a process that is forked for it calls its argument first.
    """
    part = _MemberPart(node.share)
    try:
        while not part.is_over() and not part.address:
            part.wait((), _LOOK_S)
        engine = _join_head(part, node, say)
        if engine is not None:
            record(engine.ports, part.link.close)
            _stay_until_done(part, node, engine)
        return part.lost
    finally:
        part.link.close()


class _MemberPart:
    """News from node 0."""

    def __init__(self, share: ClusterShare) -> None:
        until = time.monotonic() + _REACH_S
        self.link = link.MemberLink(share.head, share.secret, share.node_rank, share.host, until)
        self.address = ""  # of Ray's head
        self.over = False  # nothing more to do
        self.lost = ""  # why, or "" when the driver has ended

    def is_over(self) -> bool:
        """Hear what node 0 says, and return whether there is nothing more to do."""
        for word in [] if self.over else self.link.take(time.monotonic()):
            if word.kind == link.ADDRESS:
                self.address = word.text
            else:  # the last there is
                self.over, self.lost = True, word.text
        return self.over

    def lose(self, text: str) -> None:
        """Tell node 0 that this node is no part of the cluster any more."""
        self.over, self.lost = True, text
        self.link.lost(text)

    def wait(self, fds: Iterable[int], timeout_s: float | None = None) -> None:
        """Wait until node 0 says something or one of the descriptors is readable."""
        linux.readable([*fds, *(sock.fileno() for sock in self.link.sockets())], timeout_s)


def _join_head(part: _MemberPart, node: TaskNode, say: Callable[[str], None]) -> RayProcesses | None:
    """Join the head; return None when this node's part was over before."""
    if part.over:
        return None
    share = node.share
    try:
        plan = ray_start.RayStartPlan(
            share.directory,
            lambda: ray_start.find_ports(ray_start.listens_at(share)),
            lambda found: {**node.environment, **ray_start.port_variables(found, part.address)},
            lambda found, temporary: ray_start.worker_arguments(share, found, temporary, part.address),
        )
        engine = ray_start.start(node.family, plan, part.is_over, say)
    except (ray_start.RayStartFailed, OSError) as error:
        part.lose(f"Ray could not be started on node {share.host}: {error}")
        return None
    if engine is not None:
        part.link.joined(share.devices, share.cpus)
    return engine


def _stay_until_done(part: _MemberPart, node: TaskNode, engine: RayProcesses) -> None:
    """Return when the driver has ended, or something is lost."""
    while not part.is_over():
        part.wait(engine.watched, node.family.reap())
        if name := engine.gone():
            until = time.monotonic() + _SETTLE_S
            while not part.is_over() and (left_s := until - time.monotonic()) > 0:
                part.wait((), left_s)
            if not part.over:
                part.lose(lost_engine(node.share, engine, name, node.kept))


def _on_sigterm(_number: int, _frame: types.FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending; its Ray is ended first
    raise _Stopped
