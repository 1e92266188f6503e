"""A Ray cluster of several machines, all of them this one: addresses of the loopback interface, each with what
`sgpu join` gives a machine. Its processes are ended by what is in their environment, and nothing of it stays.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from serverless_gpu.engines.ray import start_arguments
from serverless_gpu.engines.ray.driver_client import RayAccess
from serverless_gpu.engines.ray.uplink_launcher import NodeFile, write_node_file
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.processes.spawn import clean_variables, search_path
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile, write_profile
from serverless_gpu.testing import stop_agent
from tests.e2e.ray.plain_ray import PYTHON
from tests.e2e.ray.remains import Footprint
from tests.support.local.observe import wait_for

TRY_S = 70.0
_END_S = 60.0
_TRIES_MAX = 3
_blocks = iter(range(12_000 + os.getpid() % 150 * 100, 32_000, start_arguments.PORTS))


class Machine:
    """One machine: its Ray, its home, its agent.

    Attributes:
        node: what Ray is started with.
        home: the home of its agent.
    """

    def __init__(self, cluster: Path, name: str, address: str, types: tuple[str, ...]) -> None:
        self._directory = cluster / name
        self._directory.mkdir(mode=0o700)
        self.home = Home(self._directory / "home")
        self.home.root.mkdir(mode=0o700)
        self._profile, self._file = self.home.root / "node.json", self.home.root / "ray.json"
        write_profile(
            self._profile, UplinkProfile(url="http://127.0.0.1:9", token="none", name=name)
        )  # nobody answers there
        variables = {"SERVERLESS_GPU_FAKE": "H100:1", **clean_variables(os.environ)}
        file = NodeFile(
            python=sys.executable,
            paths=tuple(search_path()),
            home=str(self.home.root),
            profile=str(self._profile),
            environ=variables,
        )
        write_node_file(self._file, file)
        self.node = start_arguments.MachineShare(
            name=name,
            address=address,
            port=_free_block(),
            directory=str(self._directory / "r"),
            token_file=str(cluster / "token"),
            node_file=str(self._file) if types else "",
            gpus=tuple(f"FAKE-{number}" for number in range(sum(kind != "CPU" for kind in types))),
            types=types,
        )
        self.footprint = Footprint(f"SGPU_TEST_MACHINE={secrets.token_hex(8)}", (str(cluster),))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def _log(self) -> Path:
        return self._directory / "output"

    def start(self, head: str = "") -> None:
        """Start Ray here: as a head, or as a node of one."""
        argv = (
            start_arguments.join_command(str(PYTHON), self.node, head)
            if head
            else start_arguments.head_command(str(PYTHON), self.node)
        )
        name, _, value = self.footprint.mark.partition("=")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**start_arguments.environment(self.node, clean_variables(os.environ)), name: value},
                start_new_session=True,
            )

    def wait_ready(self, head: str = "") -> None:
        """Wait until Ray says that it runs; one that ends before it does, or takes too long, is started again.

        A raylet whose agents take longer than 15 s ends, and `ray start` waits for it two minutes all the same.

        Args:
            head: as for `start`.
        """
        tries, until = 1, time.monotonic() + TRY_S

        def ready() -> bool:
            nonlocal tries, until
            text = self._log.read_text(encoding="utf-8", errors="replace")
            if "Ray runtime started" in text:
                return True
            assert self._process is not None
            if self._process.poll() is not None or self._raylet_failed() or time.monotonic() > until:
                assert tries < _TRIES_MAX, text
                self.kill()
                self.start(head)
                tries, until = tries + 1, time.monotonic() + TRY_S
            return False

        wait_for(ready, f"the Ray of {self.node.name} has started", limit_s=2 * _TRIES_MAX * TRY_S)

    def _raylet_failed(self) -> bool:
        with suppress(OSError):
            logs = Path(self.node.directory) / "session_latest" / "logs"
            return "Check failed" in (logs / "raylet.out").read_text(encoding="utf-8", errors="replace")
        return False

    def processes(self) -> dict[int, str]:
        """Return the processes of Ray's here, and their command lines: by their variables, and with their children."""
        names = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        parents = {pid: parent for pid in names if (parent := _parent(pid))}
        mark = self.footprint.mark.encode()
        own = {pid for pid in parents if mark in _read(pid, "environ")}
        while more := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= more
        return {pid: _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace") for pid in own}

    def kill(self) -> None:
        """End every process of Ray's here at once; what is no longer Ray's stays."""

        seen: dict[int, bytes] = {}  # those that were renamed and lose their parent are found only once

        def gone() -> bool:
            seen.update({pid: _began(pid) for pid in self.processes()})
            left = [pid for pid, began in seen.items() if began and _began(pid) == began]
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self._process is not None:
                self._process.poll()
            return not left

        wait_for(gone, f"the Ray of {self.node.name} is gone", limit_s=_END_S)
        shutil.rmtree(self.node.directory, ignore_errors=True)

    def uplink(self) -> int | None:
        """Return the process of the agent's uplink, if there is one."""
        found = start_stop.running(self.home, self._profile)
        return None if found is None else found.pid

    def end(self) -> None:
        """End everything here."""
        self.kill()
        start_stop.stop_all(self.home)
        with suppress(FileNotFoundError):
            stop_agent(self.home.root)
        shutil.rmtree(self.home.sockets(), ignore_errors=True)


class Cluster:
    """A head, which offers nothing, and nodes.

    Args:
        directory: of all of it, with a short path.
        offers: types of the devices of each node, by name.
        machines: takes them all, as they are made.

    Attributes:
        head: its machine.
        nodes: by name.
    """

    def __init__(self, directory: Path, offers: dict[str, tuple[str, ...]], machines: list[Machine]) -> None:
        token = directory / "token"
        token.write_text(secrets.token_hex(32), encoding="ascii")
        token.chmod(0o600)
        self.head = Machine(directory, "head", "127.0.0.10", ())
        machines.append(self.head)
        self.nodes: dict[str, Machine] = {}
        for number, (name, types) in enumerate(offers.items()):
            self.nodes[name] = Machine(directory, name, f"127.0.0.{11 + number}", types)
            machines.append(self.nodes[name])

    @property
    def address(self) -> str:
        """Return the address of the head."""
        return f"127.0.0.10:{self.head.node.port}"

    def access(self, pool: str) -> RayAccess:
        """Return how a server on the head's machine reaches it."""
        variables = start_arguments.variables(self.head.node.token_file)
        return RayAccess(address=self.address, node_address="127.0.0.10", pool=pool, variables=variables)

    def start(self) -> None:
        """Start the head, then its nodes one by one: at once they take longer than Ray waits on a busy machine."""
        self.head.start()
        self.head.wait_ready()
        for machine in self.nodes.values():
            machine.start(self.address)
            machine.wait_ready(self.address)


@contextmanager
def cluster(offers: dict[str, tuple[str, ...]]) -> Iterator[Cluster]:
    """Yield a cluster that has started; nothing of it is left afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="sgr-", dir="/tmp"))
    machines: list[Machine] = []
    try:
        made = Cluster(directory, offers, machines)
        made.start()
        yield made
    finally:
        for machine in machines:
            machine.footprint.look()
        for machine in machines:
            machine.end()
        shutil.rmtree(directory)
    left = {machine.node.name: machine.footprint.left() for machine in machines}
    assert not any(left.values()), left


def _free_block() -> int:
    """Return the first of a hundred ports that nobody has."""
    for base in _blocks:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", base)),
            socket.create_server(("127.0.0.1", base + 1)),
        ):
            return base
    raise AssertionError("no ports are free")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int | None:
    """Return a process's parent; None for one that is over."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields and fields[0] not in (b"Z", b"X") else None


def _began(pid: int) -> bytes:
    """Return when a process began, b"" when there is none; a zombie is one."""
    return b"".join(_read(pid, "stat").rpartition(b")")[2].split()[19:20])
