"""Implements the engine for a single node, the server's machine.

    events() (every few seconds), submit() ──▶ uplink runs? ─▶ nothing
                                               else         ─▶ start it detached: it outlives this process

The engine keeps the node's uplink running. The uplink reports the node's devices to the server and starts gangs. The
scheduler, not the engine, records the devices of each gang. The engine stores each reservation as an empty file, which
the next server process reads.

Failure cases: If the uplink is killed, the engine starts another uplink, which resumes control of running attempts. If
the uplink cannot start, for example because of a full disk, the engine reports the node as lost. After a successful
start of the uplink, the engine reports the node as up.
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
    """Offers the server's machine as a single node.

    `home` is the home directory of the agent that runs the gangs. `directory` contains the engine's files. The engine
    creates `directory` if needed. `environ` contains the environment variables that describe the node's resources.
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
        """Return True if a node name refers to this machine."""
        return node == self._node.name

    def plan(self, gang: Gang) -> Request:
        """Return the reservation that `submit` would make for a gang."""
        shares = ", ".join(f"{share.count} {share.gpu_type} on {share.node}" for share in gang.shares)
        return Request(gang=gang, text=f"start {gang.id} with the agent of this machine: {shares}")

    def submit(self, request: Request) -> Placed | Waiting | Impossible:
        """Record a reservation for a gang, and start the uplink if necessary."""
        gang = request.gang
        for share in gang.shares:
            if share.node != self._node.name:
                return Impossible(sentence=f"the local engine has no node {share.node!r}, only {self._node.name!r}")
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
        """Start the uplink if necessary, and report a change of the node's state."""
        with self._lock:
            problem = self._ensure()
            if problem == self._told:
                return []
            self._told = problem
        return [NodeLost(node=self._node.name, sentence=problem) if problem else NodeUp(node=self._node)]

    def close(self) -> None:
        """Do nothing: the uplink and running attempts continue."""

    def _ensure(self) -> str:
        """Start the uplink if necessary. Return the error of a failed start, or ""."""
        try:
            start_stop.ensure(self._home, self._profile_path, self._environ)
        except ServerlessGpuError as error:
            self._problem = error.message
        else:
            self._problem = ""
        return self._problem
