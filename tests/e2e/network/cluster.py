"""A real server and real nodes, each in a namespace of its own; runs are submitted over HTTP as a client does.

with Cluster(network, home, GRACE) as cluster:
    node = cluster.join("n1")                       uplink, agent, supervisors, ranks in its namespace
    run_id = cluster.submit(beats.beat, where, retries=1)
    node.wire.cut()
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from serverless_gpu.ambient import machine, new_run_id
from serverless_gpu.client.caller_context import caller_context
from serverless_gpu.client.launch.preflight import pack
from serverless_gpu.model.lifecycle.attempt import Fact
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.node.attempt.server_attempt_record import read_remote
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile, write_profile
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import RunRequest, RunView, Target
from tests.support.invited import node_token
from tests.support.local.observe import Process, agent, wait_for
from tests.support.network.namespaces import Network, Wire, entering, inside
from tests.support.node.joining import join_command
from tests.support.remote.server_process import ServerProcess
from tests.support.remote.submitting import Submitting
from tests.support.server.certificates import Authority

PORT, PORT_BESIDE = 7878, 7879
PRESENT_S = 3.0
"""Seconds, like the grace periods here: a node that is silent gets no attempt of those that were given up."""


class ClusterNode:
    """A node: a home, and processes in a namespace.

    Args:
        wire: its namespace.
        profile: what it is called, and where it finds the server.
        environ: variables for its processes.

    Attributes:
        profile: where it says that.
        environ: all variables of its processes.
    """

    def __init__(self, wire: Wire, profile: UplinkProfile, *, environ: dict[str, str]) -> None:
        self.name, self.wire = profile.name, wire
        self.home = Home(Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp")))
        self.profile = self.home.root / "profile.json"
        self.environ = {**os.environ, **environ, "SERVERLESS_GPU_HOME": str(self.home.root)}
        self.write(profile)

    def write(self, profile: UplinkProfile) -> None:
        """Have it find the server so."""
        write_profile(self.profile, profile)

    def start(self) -> None:
        """Have its uplink running."""
        command = [*entering(self.wire.namespace), *join_command(self.home.root, self.profile)]
        subprocess.run(command, check=True, env=self.environ, timeout=60)

    def uplink(self) -> Process:
        """Return its uplink."""
        found = wait_for(lambda: start_stop.running(self.home, self.profile), f"{self.name} has an uplink")
        assert found is not None
        return Process(found.pid)

    def agent(self) -> Process:
        """Return its agent."""
        return agent(self.home.root)

    def standing(self, run_id: str, fence: int = 1) -> str:
        """Return what the attempt's directory says of the server."""
        remote = read_remote(self.home.attempt(run_id, fence))
        return "" if remote is None else remote.standing

    def log(self) -> str:
        """Return what its uplink wrote."""
        return (self.home.root / "uplink.log").read_text()

    def remove(self) -> None:
        """Remove its home, once its processes are gone."""
        wait_for(lambda: not self.wire.pids(), f"no process of {self.name} is left")
        shutil.rmtree(self.home.root, ignore_errors=True)


class Cluster:
    """The server and its nodes.

    Args:
        network: where they are.
        home: of the server.
        changes: fields of `Settings`.
        wires: how many nodes there can be.
    """

    def __init__(self, network: Network, home: Path, changes: Mapping[str, float], *, wires: int) -> None:
        self.network, self.home = network, home
        self.nodes: dict[str, ClusterNode] = {}
        self._wires = [network.wire() for _ in range(wires)]
        authority = Authority(home)
        self._ca = authority.ca
        certificate, key = authority.sign(*network.names)
        self._server = ServerProcess(
            home,
            *("host=0.0.0.0", f"port={PORT}", "node=false", f"tls_cert={certificate}", f"tls_key={key}"),
            *(f"Settings.{name}={value}" for name, value in changes.items()),
            f"lifecycle.liveness.PRESENT_S={PRESENT_S}",
            around=entering(network.server),
        )
        self._connection: Connection | None = None
        self._caller = Submitting(home / "caller")

    def __enter__(self) -> Cluster:
        self.start_server()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close()
        self.stop_server()
        for node in self.nodes.values():
            node.wire.signal_all(signal.SIGKILL)
            node.remove()

    def start_server(self) -> None:
        """Start the server, and wait until it answers."""
        self._server.start()

    def stop_server(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the server."""
        self._server.kill(number)

    def token(self, name: str = "token") -> str:
        """Return the administrator's token, or the nodes' (``node.token``)."""
        return (self.home / "server" / name).read_text(encoding="ascii").strip()

    def join(self, name: str, *, gpus: int = 1, url: str = "", **environ: str) -> ClusterNode:
        """Start a node, and wait until the server counts on it."""
        node = self.invite(name, gpus=gpus, url=url, **environ)
        self.joined(node)
        return node

    def invite(self, name: str, *, gpus: int = 1, url: str = "", **environ: str) -> ClusterNode:
        """Start a node, and do not wait."""
        variables = {"SERVERLESS_GPU_FAKE": f"H100:{gpus}", **environ}
        wire = self._wires[len(self.nodes)]
        profile = UplinkProfile(url=url or f"https://{wire.address}:{PORT}", token="", name=name, ca=str(self._ca))
        node = ClusterNode(wire, profile, environ=variables)
        self.nodes[name] = node
        with inside(self.network.server):
            token = node_token(self._administrator(), name, node.home)
        node.write(msgspec.structs.replace(profile, token=token))
        node.start()
        return node

    @staticmethod
    def joined(node: ClusterNode) -> None:
        """Wait until the server counts on a node."""
        wait_for(lambda: "joined" in node.log(), f"{node.name} has joined", 60)

    def wire_of_next(self) -> Wire:
        """Return the wire that the next node gets."""
        return self._wires[len(self.nodes)]

    def ask(self, method: str, path: str, body: Any = None, *, answer: Any) -> Any:
        """Ask the server as its administrator, from beside it."""
        with inside(self.network.server):
            return self._administrator().ask(method, path, body, answer=answer)

    def _administrator(self) -> Connection:
        """Return the administrator's connection; the caller is beside the server."""
        if self._connection is None:
            self._connection = Connection(f"http://127.0.0.1:{PORT_BESIDE}", self.token(), patience_s=60)
        return self._connection

    def submit(self, function: Callable[..., object], *args: object, gpus: int = 1, **spec: Any) -> str:
        """Submit a call of a function; return the run's identifier."""
        request = run_request(function, *args, gpus=gpus, **spec)
        self.ask("POST", "/runs", request, answer=RunView)
        return request.id

    def submit_gang(self, function: Callable[..., object], *args: str, gpus: int = 2, **options: object) -> str:
        """Submit a call of a function of `beats.py` whose files travel: it may have several nodes; return the run."""
        options = {"gpus": gpus, "gpu_type": "H100", "grace": 1} | options
        with inside(self.network.server):
            return self._caller.submit(function, *args, environ={"SERVERLESS_GPU_HOME": str(self.home)}, **options)

    def run(self, run_id: str) -> RunView:
        """Return a run as its owner sees it."""
        found: RunView = self.ask("GET", f"/runs/{run_id}", answer=RunView)
        return found

    def read(self, path: str, **query: str) -> bytes:
        """Return bytes."""
        with inside(self.network.server):
            assert self._connection is not None
            return self._connection.get(path, query=query)

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return rows of the server's database, read beside it."""
        database = sqlite3.connect(f"file:{self.home / 'server' / 'server.db'}?mode=ro", uri=True)
        try:
            return database.execute(query, values).fetchall()
        finally:
            database.close()

    def facts(self, run_id: str, fence: int, crew: int = 0) -> list[Fact]:
        """Return the facts of a crew of an attempt that the server has."""
        query = "SELECT fact_json FROM facts WHERE run_id = ? AND fence = ? AND crew = ? ORDER BY seq"
        return [msgspec.json.decode(text, type=Fact) for (text,) in self.rows(query, run_id, fence, crew)]

    def states(self, run_id: str) -> list[str]:
        """Return the states of a run in order."""
        return [state for (state,) in self.rows("SELECT state FROM events WHERE run_id = ? ORDER BY seq", run_id)]


def run_request(function: Callable[..., object], *args: object, gpus: int = 1, **spec: Any) -> RunRequest:
    """Return the request for a call of a function, which ranks import from where it lies.

    They run in the interpreter that our environment was made with, which has no torch to import: they are many.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "call.pkl")
        pack(str(path), function, args, {})
        call = path.read_bytes()
    context = caller_context()
    python = str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"))
    if Path(python).exists():
        context = msgspec.structs.replace(context, python=python)
    return RunRequest(
        id=new_run_id(),
        spec=RunSpec(
            name=function.__name__, remote=True, resources=Resources(gpus=gpus, gpu_type="H100"), grace_s=1.0, **spec
        ),
        target=Target(
            machine=machine(),
            caller=machine(),
            python=f"{sys.version_info[0]}.{sys.version_info[1]}",
            platform="linux-x86_64",
        ),
        context=msgspec.Raw(msgspec.json.encode(context)),
        call=call,
    )
