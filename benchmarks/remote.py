"""Rounds through a server: `sgpu up` in the home of the row, calls of another process, and the server by itself."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import sqlalchemy as sa

from benchmarks import ranks
from benchmarks.contestants import ContestantFailed
from benchmarks.databases import held
from benchmarks.ranks import GIGABYTE, now_ns, stamps
from serverless_gpu import distributed
from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.start_stop import stop_all
from serverless_gpu.server.core.server_key import Sealer, read_keys
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import events, runs
from serverless_gpu.server.records.events import StoredEvent
from serverless_gpu.server.records.runs import NewRun
from serverless_gpu.testing import stop_agent
from serverless_gpu.wire.agents import AgentHello, AgentWelcome, Order
from serverless_gpu.wire.base import PROTOCOL
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import Target

QUEUED = 10_000
_CONTEXT = msgspec.json.encode({"environ": {"VARIABLE": "x" * 4000}})
_IMPORTS = (
    "import starlette.applications, uvicorn, sqlalchemy, alembic, cryptography; print('ready', flush=True); input()"
)
_STOP_S = 30.0
_local = distributed(gpus=1, gpu_type="CPU", quiet=True)
_remote = distributed(gpus=1, gpu_type="CPU", quiet=True, remote=True)
_stamp_here = _local(ranks.first_line)
_stamp_there = _remote(ranks.first_line)
_tensor_there = _remote(ranks.make_tensor)


def warm(directory: str) -> dict[str, object]:
    """Call through the server with everything standing by; until the caller has its results."""
    serving()
    called_ns = now_ns()
    _stamp_there.distributed(directory)
    return _times(called_ns, directory, now_ns())


def warm_local(directory: str) -> dict[str, object]:
    """The same call without a server."""
    called_ns = now_ns()
    _stamp_here.distributed(directory)
    return _times(called_ns, directory, now_ns())


def cold(directory: str) -> dict[str, object]:
    """Call through the server when the node has no agent; until the first line of the function."""
    serving()
    stop_agent(own_home())
    called_ns = now_ns()
    _stamp_there.distributed(directory)
    return _times(called_ns, directory, now_ns())


def cold_local(directory: str) -> dict[str, object]:
    """The same without a server."""
    stop_agent(own_home())
    called_ns = now_ns()
    _stamp_here.distributed(directory)
    return _times(called_ns, directory, now_ns())


def tensor(directory: str) -> dict[str, object]:
    """Return a tensor of 1 GB through the server; from when the rank has it until the caller has read it once."""
    serving()
    (value,) = _tensor_there.distributed(directory, GIGABYTE)
    got_ns = now_ns()
    ranks.read(value)
    read_ns = now_ns()
    (made_ns,) = stamps(directory, "made", 1)
    del value
    forget_runs()
    return {"ms": (got_ns - made_ns) / 1e6, "read_ms": (read_ns - made_ns) / 1e6}


def forget_runs() -> None:
    """Remove the files of all runs, so that a disk holds more rounds."""
    for place in ("runs", "remote"):
        shutil.rmtree(own_home() / place)
        (own_home() / place).mkdir(mode=0o700)
    os.sync()


def up(directory: str) -> dict[str, object]:
    """Start `sgpu up` in a home that has been used, without a node; until it answers, and what it holds then."""
    home = own_home() / "up"
    home.mkdir(exist_ok=True)
    with _server(home, "--no-node") as server:
        return {"ms": server.ready_ms, "mb": _resident_mb(server.pid)}


def libraries(directory: str) -> dict[str, object]:
    """Import the libraries that a server is made of, and do nothing."""
    began_ns = now_ns()
    with _process([sys.executable, "-c", _IMPORTS], own_home()) as (process, _line):
        ready_ms = (now_ns() - began_ns) / 1e6
        return {"ms": ready_ms, "mb": _resident_mb(process.pid)}


def restart_full(directory: str) -> dict[str, object]:
    """Start a server again whose queue is 10,000 long; until a node that joins has its first order."""
    return _restart(QUEUED)


def restart_short(directory: str) -> dict[str, object]:
    """The same with a hundred."""
    return _restart(100)


# --- the server -------------------------------------------------------------------------------------------------------


class _Server(msgspec.Struct, frozen=True):
    url: str
    pid: int
    ready_ms: float


@contextlib.contextmanager
def _process(command: list[str], home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process, and give it out with its first line; it ends with the block."""
    environ = {**os.environ, "SERVERLESS_GPU_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_S)


@contextlib.contextmanager
def _server(home: Path, *options: str) -> Iterator[_Server]:
    began_ns = now_ns()
    with _process([sys.executable, "-m", "serverless_gpu.cli", "up", "--port", "0", *options], home) as (process, line):
        url = line.rpartition(" ")[2].strip()
        if not url.startswith("http"):
            raise ContestantFailed(f"the server did not start: {line}")
        yield _Server(url, process.pid, (now_ns() - began_ns) / 1e6)


@functools.cache
def serving() -> _Server:
    """Start the server of this home with this machine as its node; all of it ends with the contestant."""
    held.callback(stop_all, Home(own_home()))
    return held.enter_context(_server(own_home()))


# --- a long queue -----------------------------------------------------------------------------------------------------


def _restart(count: int) -> dict[str, object]:
    home = _queue(count)
    (home / "server" / "node.token").unlink(missing_ok=True)  # a token is one node's, and each round has its own
    began_ns = now_ns()
    with _server(home, "--no-node") as server:
        token = (home / "server" / "node.token").read_text(encoding="ascii").strip()
        # A node of its own each round: what earlier ones were given is theirs.
        with contextlib.closing(Connection(server.url, token)) as connection:
            welcome = connection.ask("POST", "/agents", _hello(), answer=AgentWelcome)
            orders = connection.stream("GET", f"/agents/{welcome.node}/orders", answer=Order)
            next(iter(orders))
            return {"ms": (now_ns() - began_ns) / 1e6, "ready_ms": server.ready_ms}


def _hello() -> AgentHello:
    device = Device(uuid="CPU-0", index=0, type="CPU", memory_bytes=0, kind=DeviceKind.CPU)
    return AgentHello(
        name=f"node-{new_run_id()}",
        machine=new_run_id(),
        boot_id=new_run_id(),
        version="",
        protocol=PROTOCOL,
        python="3.11",
        platform="linux-x86_64",
        devices=(device,),
    )


@functools.cache
def _queue(count: int) -> Path:
    """Return a home whose server has so many runs that wait."""
    home = own_home() / f"queue-{count}"
    home.mkdir()
    with _server(home, "--no-node"):
        pass
    with contextlib.closing(Database(f"sqlite:///{home / 'server' / 'server.db'}", clock=SystemClock())) as database:
        sealer = Sealer(read_keys(home / "server").sealing)
        database.write(lambda connection: _fill(connection, sealer, count))
    return home


def _fill(connection: sa.Connection, sealer: Sealer, count: int) -> None:
    owner: str = connection.execute(sa.text("SELECT name FROM principals WHERE role = 'admin'")).scalar_one()
    for number in range(count):
        run_id = new_run_id()
        new = NewRun(
            id=run_id,
            owner=owner,
            spec=RunSpec(remote=True, environment="snapshot", resources=Resources(gpus=1, gpu_type="CPU")),
            target=Target(python="3.11", platform="linux-x86_64"),
            request_sha256="",
            context_sealed=sealer.seal(_CONTEXT, about=run_id),
            call=b"x" * 1000,
            snapshot="0" * 64,
        )
        runs.insert(connection, new, at_ns=number + 1)
        events.add(connection, [StoredEvent(run_id=new.id, seq=1, fence=0, at_ns=number + 1, state=State.QUEUED)])


def _times(called_ns: int, directory: str, returned_ns: int) -> dict[str, object]:
    (entered_ns,) = stamps(directory, "enter", 1)
    return {"ms": (returned_ns - called_ns) / 1e6, "enter_ms": (entered_ns - called_ns) / 1e6}


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6


def own_home() -> Path:
    """Return the home of this contestant."""
    return Path(os.environ["SERVERLESS_GPU_HOME"])
