"""Tracks all nodes of a run's Ray cluster on node 0 and runs the cluster's part on every other node.

    RunCluster, node 0
      this node: ray start, gcs_server, raylet ── pidfds ───┐
      node 1, 2, … ── link: "joined", "lost", end of file ──┴─▶ gone(): a message that names the node and what ended

    take_part, node n                                       node task of node 0
      ├─ link ── reads the address of Ray's head ◀────────    …
      ├─ ray start --block --address=… ──▶ joined ────────▶   the driver starts when all nodes have joined
      └─ stays ◀── done ──────────────────────────────────    the driver has ended

Failure cases:

* If several nodes or Ray processes are lost, node 0 reports the first loss, which causes the later losses.
* If a process without the run's secret connects to the link, `link.py` closes the connection. The cluster continues.
* If Ray fails to start or ends on node n, node n sends a message to node 0. Node 0 and node n both report the failure
  of Ray on node n.
* If the node task of node 0 has ended or never started, node n reports a failure that names node 0's machine.
* If Ray on node n ends because the head has ended, node n waits `_SETTLE_S` seconds for the message "done".
* On SIGTERM, the node task ends this node's Ray before terminating itself by SIGTERM.
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
    """Tracks all nodes of the run's cluster on node 0.

    After the attempt, the supervisor stores this node's Ray logs in the directory `kept`.
    """

    def __init__(self, share: ClusterShare, kept: str) -> None:
        self._share = share
        self._kept = kept
        self._engine: RayProcesses | None = None
        self._head: link.HeadLink | None = None
        self._offers = [share]
        self._lost = ""

    def listen(self) -> None:
        """Let the other nodes join.

        Call `listen` after forking the driver. Raises OSError if the head's address is in use.
        """
        share = self._share
        if share.num_nodes > 1:
            self._head = link.HeadLink(share.head, share.secret, share.num_nodes, share.host)

    def begin(self, engine: RayProcesses, address: str) -> None:
        """Watch this node's Ray processes, and let the other nodes join this Ray."""
        self._engine = engine
        if self._head is not None:
            self._head.tell(address)

    def missing(self) -> list[int]:
        """Return the numbers of the nodes that have not joined the cluster."""
        return [] if self._head is None else self._head.missing()

    def shares(self) -> list[ClusterShare]:
        """Return the shares of all joined nodes, starting with this node."""
        return self._offers

    def fds(self) -> list[int]:
        """Return the descriptors that become readable when `gone` may detect a loss."""
        sockets = [] if self._head is None else [sock.fileno() for sock in self._head.sockets()]
        return [*(self._engine.watched if self._engine is not None else ()), *sockets]

    def gone(self, timeout_s: float = 0.0) -> str:
        """Return an error message about the first lost node or Ray process, or "".

        Wait up to `timeout_s` seconds for a loss.
        """
        until = time.monotonic() + timeout_s
        while not (lost := self._look()) and (left_s := until - time.monotonic()) > 0:
            linux.readable(self.fds(), left_s)
        return lost

    def done(self) -> None:
        """Notify the other nodes that the driver has ended. Call `done` before this node's Ray ends."""
        if self._head is not None:
            self._head.done()
            self._head = None

    def leave(self) -> None:
        """Close the connections inherited by a forked process without sending a message."""
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
    """Return the error message for a node whose Ray has ended.

    `name` is the Ray process that has ended, and `kept` is the log directory.
    """
    text = f"Ray on node {share.host} is gone: its {name} ended while the run needed it. Its logs: {kept}"
    words = engine.last_words()
    return f"{text}\n{words}" if words else text


_REACH_S = 300.0  # Time limit in seconds to reach node 0, which may start later and import Ray from a slow disk.
_LOOK_S = 0.1  # Interval in seconds between two connection attempts to node 0.
_SETTLE_S = 1.0


class _Stopped(BaseException):
    """Raised by the SIGTERM handler to interrupt the node task."""


class TaskNode(NamedTuple):
    """The share, processes and environment of a node task's node.

    After the attempt, the supervisor stores the node's Ray logs in the directory `kept`.
    """

    share: ClusterShare
    family: Family
    environment: Mapping[str, str]
    kept: str


def until_stopped(act: Callable[[], str]) -> str | None:
    """Return the result of `act`, or None if SIGTERM interrupted `act`.

    After SIGTERM, this process ignores further SIGTERMs, because its shutdown has a time limit. A second SIGTERM during
    the shutdown is normal. When one node reports a lost cluster, the other nodes receive SIGTERM while they also report
    the loss.
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
    """Run this node's part of the cluster until the driver has ended.

    Return "" or the error message of a loss. `record` starts the process that records Ray's metrics once Ray runs. The
    recording process first calls the second argument of `record`, which closes its copy of the link.
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
    """The connection to node 0 and the state received from node 0."""

    def __init__(self, share: ClusterShare) -> None:
        until = time.monotonic() + _REACH_S
        self.link = link.MemberLink(share.head, share.secret, share.node_rank, share.host, until)
        self.address = ""  # Address of the Ray head, or "" while unknown.
        self.over = False  # True when this node's part of the cluster is complete.
        self.lost = ""  # Error message of a lost node or Ray process, or "" if the driver has ended.

    def is_over(self) -> bool:
        """Read the messages from node 0. Return True if this node's part of the cluster is complete."""
        for word in [] if self.over else self.link.take(time.monotonic()):
            if word.kind == link.ADDRESS:
                self.address = word.text
            else:  # `LOST` and `DONE` are the last messages of a link.
                self.over, self.lost = True, word.text
        return self.over

    def lose(self, text: str) -> None:
        """Notify node 0 that this node has left the cluster."""
        self.over, self.lost = True, text
        self.link.lost(text)

    def wait(self, fds: Iterable[int], timeout_s: float | None = None) -> None:
        """Wait until node 0 sends a message or one of the descriptors is readable."""
        linux.readable([*fds, *(sock.fileno() for sock in self.link.sockets())], timeout_s)


def _join_head(part: _MemberPart, node: TaskNode, say: Callable[[str], None]) -> RayProcesses | None:
    """Start Ray on this node and join the head. Return None if this node's part of the cluster has ended."""
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
    """Wait until the driver ends or this node loses its Ray processes or the head."""
    while not part.is_over():
        part.wait(engine.watched, node.family.reap())
        if name := engine.gone():
            until = time.monotonic() + _SETTLE_S
            while not part.is_over() and (left_s := until - time.monotonic()) > 0:
                part.wait((), left_s)
            if not part.over:
                part.lose(lost_engine(node.share, engine, name, node.kept))


def _on_sigterm(_number: int, _frame: types.FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The node task is terminating and ends Ray first.
    raise _Stopped
