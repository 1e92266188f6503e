"""Provides the server's own machine as an engine with one node, and keeps the node's uplink running.

    events() (every few seconds), submit() ──▶ uplink runs? ─▶ nothing
                                               else         ─▶ start it detached: it outlives this process

The uplink does the work of a node. The local engine transfers no data and does not count devices. The node reports its
devices, and the scheduler records which gang holds each device. A reservation is an empty file that the next server
process finds.

Failure cases: If the uplink is killed, the engine starts another uplink, which continues the running attempts. If the
uplink cannot start (process limit, full disk), the engine reports the node as lost, with the reason. A later successful
start makes the node available again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from serverless_gpu.engines.base import (
    Engine,
    EngineNode,
    Gang,
    Impossible,
    NodeLost,
    NodeUp,
    Placed,
    Request,
    Waiting,
)
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile, write_profile


class LocalEngine(Engine):
    """The server's own machine as an engine.

    `home` is the home directory of the agent that runs the gangs. `directory` holds the files of this engine. The
    engine creates the directory if needed. `environ` contains the environment variables that describe the node's
    resources.
    """

    def __init__(self, home: Home, directory: Path, *, profile: UplinkProfile, environ: Mapping[str, str]) -> None:
        self._home, self._environ = home, dict(environ)
        self._node = EngineNode(name=profile.name)
        self._profile_path = directory / "node.json"
        self._gangs = directory / "gangs"
        self._gangs.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_profile(self._profile_path, profile)
        self._lock = threading.Lock()
        self._problem = ""
        self._told: str | None = None

    def nodes(self) -> Sequence[EngineNode]:
        """Return this machine, or an empty list while its uplink cannot run."""
        return [] if self._problem else [self._node]

    def has(self, node: str) -> bool:
        """Return True if a node is this machine."""
        return node == self._node.name

    def plan(self, gang: Gang) -> Request:
        """Return the reservation of a gang that this machine's agent would start."""
        shares = ", ".join(f"{share.count} {share.gpu_type} on {share.node}" for share in gang.shares)
        return Request(gang=gang, text=f"start {gang.id} with the agent of this machine: {shares}")

    def submit(self, request: Request) -> Placed | Waiting | Impossible:
        """Record a reservation for a gang and start the uplink if it does not run."""
        gang = request.gang
        for share in gang.shares:
            if share.node != self._node.name:
                return Impossible(sentence=f"there is no node {share.node!r}: this machine is {self._node.name!r}")
        with self._lock:
            problem = self._ensure()
            if problem:
                return Waiting(sentence=problem)
            (self._gangs / gang.id).touch(mode=0o600)
        return Placed(gang=gang)

    def release(self, gang: str) -> None:
        """Remove the reservation of a gang."""
        with contextlib.suppress(FileNotFoundError):
            (self._gangs / gang).unlink()

    def recover(self) -> Sequence[str]:
        """Return the gangs that have reservations."""
        return sorted(os.listdir(self._gangs))

    def events(self) -> Sequence[NodeUp | NodeLost]:
        """Start the uplink if it does not run. Return an event if the state of this machine has changed."""
        with self._lock:
            problem = self._ensure()
            if problem == self._told:
                return []
            self._told = problem
        return [NodeLost(node=self._node.name, sentence=problem) if problem else NodeUp(node=self._node)]

    def close(self) -> None:
        """Leave the uplink and its attempts running."""

    def _ensure(self) -> str:
        """Start the uplink if it does not run. Return "", or the reason why the start failed."""
        try:
            start_stop.ensure(self._home, self._profile_path, self._environ)
        except ServerlessGpuError as error:
            self._problem = error.message
        else:
            self._problem = ""
        return self._problem
