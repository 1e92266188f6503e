"""The machine the server is on, as an engine: one node, whose uplink is kept running.

    events() (every few seconds), submit() ──▶ uplink runs? ─▶ nothing
                                               else         ─▶ started, detached: it outlives this process

The uplink does what a node does; this engine carries nothing. It counts no devices: the node
reports them, and the scheduler knows who has them. Reservations are empty files, so that the next process knows them.

Failure cases: the uplink was killed: another one is started, and goes on with the attempts it finds. It cannot be
started (no processes, no disk): the node is lost, with the reason, until it can.
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
    """This machine as an engine.

    `home` is that of the agent that runs the gangs; `directory` holds this engine's files, and is made if needed;
    `environ` are variables that say what the node offers.
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
        """Return this machine."""
        return [] if self._problem else [self._node]

    def has(self, node: str) -> bool:
        """Return whether a node is this machine."""
        return node == self._node.name

    def plan(self, gang: Gang) -> Request:
        """Return what would be started."""
        shares = ", ".join(f"{share.count} {share.gpu_type} on {share.node}" for share in gang.shares)
        return Request(gang=gang, text=f"have the agent of this machine start {gang.id}: {shares}")

    def submit(self, request: Request) -> Placed | Waiting | Impossible:
        """Note a gang and have the uplink run."""
        gang = request.gang
        for share in gang.shares:
            if share.node != self._node.name:
                return Impossible(sentence=f"this machine is {self._node.name!r}, there is no node {share.node!r}")
        with self._lock:
            problem = self._ensure()
            if problem:
                return Waiting(sentence=problem)
            (self._gangs / gang.id).touch(mode=0o600)
        return Placed(gang=gang)

    def release(self, gang: str) -> None:
        """Forget a gang."""
        with contextlib.suppress(FileNotFoundError):
            (self._gangs / gang).unlink()

    def recover(self) -> Sequence[str]:
        """Return the gangs that were noted and not forgotten."""
        return sorted(os.listdir(self._gangs))

    def events(self) -> Sequence[NodeUp | NodeLost]:
        """Have the uplink run, and return whether this machine can be counted on, when that is news."""
        with self._lock:
            problem = self._ensure()
            if problem == self._told:
                return []
            self._told = problem
        return [NodeLost(node=self._node.name, sentence=problem) if problem else NodeUp(node=self._node)]

    def close(self) -> None:
        """Leave the uplink and everything it looks after as it is."""

    def _ensure(self) -> str:
        """Have an uplink running; return "", or why that failed."""
        try:
            start_stop.ensure(self._home, self._profile_path, self._environ)
        except ServerlessGpuError as error:
            self._problem = error.message
        else:
            self._problem = ""
        return self._problem
