"""Nodes of a real server, each with a home on a disk of its own size, for rows about disks that are full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.server import UplinkProfile, write_profile
from serverless_gpu.node.uplink.start_stop import ensure, stop_all
from serverless_gpu.testing import stop_agent
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import NodeList, NodeView
from serverless_gpu.wire.runs import AttemptList, AttemptView
from tests.support.invited import node_token
from tests.support.local.observe import processes_of, wait_for
from tests.support.node.joining import join_command


class Machine:
    """A node of a server.

    Args:
        name: what it calls itself.
        root: its home.
        served_home: the home of the server.
        inside: a command in whose surroundings it runs.
    """

    def __init__(self, name: str, root: Path, served_home: Path, inside: Sequence[str] = ()) -> None:
        self.name = name
        self.home = Home(root)
        self._served_home = served_home
        with self._admin() as admin:
            token = node_token(admin, name, self.home)
            self.profile = root / "node.json"
            write_profile(self.profile, UplinkProfile(url=admin.url, token=token, name=name))
        self._around: subprocess.Popen[bytes] | None = None
        if inside:
            command = [*inside, *join_command(root, self.profile)]
            self._around = subprocess.Popen(command, stdin=subprocess.PIPE)
        else:
            ensure(self.home, self.profile, os.environ)
        wait_for(lambda: self.view() is not None, f"node {name} has joined")

    def view(self) -> NodeView | None:
        """Return what the server says about it."""
        with self._admin() as admin:
            found = admin.ask("GET", "/nodes", answer=NodeList).nodes
        return next((node for node in found if node.name == self.name), None)

    def attempts(self, run_id: str) -> tuple[AttemptView, ...]:
        """Return the tries at a run, on whatever node."""
        with self._admin() as admin:
            return admin.ask("GET", f"/runs/{run_id}/attempts", answer=AttemptList).attempts

    def leave(self) -> None:
        """End the command in whose surroundings it runs."""
        if self._around is not None:
            self._around.communicate(timeout=60)
            self._around = None

    def end(self) -> None:
        """End its uplink and agent."""
        self.leave()
        stop_all(self.home)
        stop_agent(self.home.root)
        wait_for(lambda: not processes_of(self.home.root), f"no process of node {self.name} is left")

    @contextlib.contextmanager
    def _admin(self) -> Iterator[Connection]:
        profile = find_profile(self._served_home, {})
        connection = Connection(profile.url, profile.token)
        try:
            yield connection
        finally:
            connection.close()
