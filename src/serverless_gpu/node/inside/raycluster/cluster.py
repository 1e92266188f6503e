"""All of Ray that a driver needs: processes of its own node and, by the link, of other nodes.

    this node: ray start, gcs_server, raylet ── pidfds ──┐
    node 1, 2, … ── link: "joined", "lost", end of file ──┴─▶ gone(): a sentence that names the node and what ended

Failure cases: several are lost (the first is reported, because the others follow from it); a stranger connects to the
link (`link.py` refuses it, and nothing is gone).
"""

from __future__ import annotations

import time

from .. import linux
from . import link
from .ray_start import RayProcesses
from .words import ClusterShare


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
