"""A real server and several nodes of it on this machine, each with a home of its own, as machines of a pool.

with Machines(home) as pool:
    node = pool.join("n1", gpus=2)
    run = pool.submit(function, where, gpus=4)        a gang of a crew on each node
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from serverless_gpu import attach
from serverless_gpu.client.runs.run import Run
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile, write_profile
from serverless_gpu.testing import stop_agent
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import RunView
from tests.support.invited import node_token
from tests.support.local.observe import Process, agent, cancel_all, nothing_of_a_run, processes_of, supervisor, wait_for
from tests.support.remote.server_process import ServerProcess
from tests.support.remote.submitting import Submitting


class Machine:
    """A node: a home, and what runs in it.

    Args:
        profile: what it is called, and where it finds the server.
        gpus: how many H100 it declares.
    """

    def __init__(self, profile: UplinkProfile, *, gpus: int) -> None:
        self.name = profile.name
        self.root = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
        self.home = Home(self.root)
        self.home.checkpoints.mkdir(mode=0o700)  # as whoever finds a home makes it
        self._profile = self.root / "profile.json"
        self._environ = {
            **os.environ,
            "SERVERLESS_GPU_HOME": str(self.root),
            "SERVERLESS_GPU_FAKE": f"H100:{gpus}",
        }
        self.write(profile)

    def write(self, profile: UplinkProfile) -> None:
        """Have it find the server so."""
        write_profile(self._profile, profile)

    def start(self) -> None:
        """Have its uplink running."""
        start_stop.ensure(self.home, self._profile, self._environ)

    def uplink(self) -> Process:
        """Return its uplink."""
        found = wait_for(lambda: start_stop.running(self.home, self._profile), f"{self.name} has an uplink")
        assert found is not None
        return Process(found.pid)

    def agent(self) -> Process:
        """Return its agent."""
        return agent(self.root)

    def supervisor(self, run_id: str) -> Process:
        """Return the supervisor of its crew of a run."""
        return supervisor(self.root, run_id)

    def log(self) -> str:
        """Return what its uplink wrote."""
        return (self.root / "uplink.log").read_text()

    def is_free(self) -> bool:
        """Return whether nothing of any run is left."""
        return nothing_of_a_run(self.root)

    def end(self) -> None:
        """End whatever runs in it, and remove the home."""
        cancel_all(self.root)
        start_stop.stop_all(self.home)
        stop_agent(self.root)
        wait_for(lambda: not processes_of(self.root), f"no process of {self.name} is left")
        shutil.rmtree(self.root, ignore_errors=True)


class Machines:
    """A server without devices of its own, and nodes that have joined it.

    Args:
        home: of the server, and of the test's client.
        words: what the server is told (`tests/support/remote/server_process.py`).
    """

    def __init__(self, home: Path, *words: str) -> None:
        self.home = home
        self.nodes: dict[str, Machine] = {}
        self.server = ServerProcess(home, "node=false", *words)
        self._connection: Connection | None = None
        self._caller = Submitting(home / "caller")

    def __enter__(self) -> Machines:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close()
        for node in self.nodes.values():
            node.end()
        self.server.kill(signal.SIGTERM)

    def join(self, name: str, *, gpus: int = 2, make: Callable[[UplinkProfile, int], Machine] | None = None) -> Machine:
        """Start a node, and wait until the server counts on it. `make` makes a node of another kind."""
        profile = UplinkProfile(url=self.server.url, token="", name=name)
        node = Machine(profile, gpus=gpus) if make is None else make(profile, gpus)
        self.nodes[name] = node
        node.write(msgspec.structs.replace(profile, token=node_token(self.administrator(), name, node.home)))
        node.start()
        wait_for(lambda: "joined" in node.log(), f"{name} has joined")
        return node

    def submit(self, function: Callable[..., object], *args: str, gpus: int = 4, **options: object) -> Run[object]:
        """Submit a call of a function of `gang_work.py`, as a script of a small environment does; return its handle."""
        options = {"gpus": gpus, "gpu_type": "H100", "grace": 2} | options
        return attach(self._caller.submit(function, *args, environ={}, **options))

    def ask(self, method: str, path: str, body: Any = None, *, answer: Any) -> Any:
        """Ask the server as its administrator."""
        return self.administrator().ask(method, path, body, answer=answer)

    def administrator(self) -> Connection:
        """Return a connection of the server's administrator."""
        if self._connection is None:
            token = (self.home / "server" / "token").read_text(encoding="ascii").strip()
            self._connection = Connection(self.server.url, token, patience_s=60)
        return self._connection

    def view(self, run: Run[object]) -> RunView:
        """Return a run as its owner sees it."""
        found: RunView = self.ask("GET", f"/runs/{run.id}", answer=RunView)
        return found

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return rows of the server's database, read beside it."""
        with contextlib.closing(
            sqlite3.connect(f"file:{self.home / 'server' / 'server.db'}?mode=ro", uri=True)
        ) as there:
            return there.execute(query, values).fetchall()
