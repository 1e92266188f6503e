"""Networks of a test's own: a server in one network namespace, each node in another, and a wire between them.

    server's namespace                       a node's namespace
    10.213.1.1 ── veth ──────────────────── 10.213.1.2           each node has a wire of its own
    10.213.2.1 ── veth ───────────────────────────────────────── 10.213.2.2
    bridge, without an address ── veth ──── 10.214.0.1           and nodes reach each other beside the server
               └───────────────── veth ───────────────────────── 10.214.0.2

A wire is cut in either direction or in both, without a word to anybody: the sender's neighbour entry gets an address
that nobody has, so packets leave and the other side's kernel drops them, as a firewall that drops would. What is
between two nodes is cut likewise (`Wire.part`), and neither does anything to the other. Nothing of it is in the
namespace of the machine, and everything is gone with the namespaces, whose names have this process's pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

_NOBODY = "02:00:00:00:00:01"
_BRIDGE = "sgbridge"
_CLONE_NEWNET = 0x40000000
_NAMES = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def need_root() -> None:
    """Skip where no namespaces can be made; a root without `ip` is a machine that is not set up for these tests."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    assert shutil.which("ip") is not None, "these tests need `ip` of iproute2"


def ip(*words: str) -> str:
    """Run `ip`, and return what it says."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


class Wire:
    """A node's namespace, and its wire to the server.

    Args:
        server: the server's namespace.
        number: of the wire, which is in its addresses.

    Attributes:
        namespace: the node's.
        address: under which the node finds the server.
        peer_address: under which other nodes find it.
    """

    def __init__(self, server: str, number: int) -> None:
        self.namespace = f"{server}-{number}"
        self.address, self._node_address = f"10.213.{number}.1", f"10.213.{number}.2"
        self.peer_address = f"10.214.0.{number}"
        self._server = server
        self._here, self._there, self.beside = f"sgs{number}", f"sgn{number}", f"sgl{number}"
        ip("netns", "add", self.namespace)
        ip("link", "add", self._here, "netns", server, "type", "veth", "peer", self._there, "netns", self.namespace)
        ip("-n", server, "addr", "add", f"{self.address}/30", "dev", self._here)
        ip("-n", self.namespace, "addr", "add", f"{self._node_address}/30", "dev", self._there)
        for namespace, device in ((server, self._here), (self.namespace, self._there), (self.namespace, "lo")):
            ip("-n", namespace, "link", "set", device, "up")
        port = f"sgb{number}"
        ip("link", "add", port, "netns", server, "type", "veth", "peer", self.beside, "netns", self.namespace)
        ip("-n", server, "link", "set", port, "master", _BRIDGE, "up")
        ip("-n", self.namespace, "addr", "add", f"{self.peer_address}/24", "dev", self.beside)
        ip("-n", self.namespace, "link", "set", self.beside, "up")
        self._of_server = _hardware_address(server, self._here)
        self._of_node = _hardware_address(self.namespace, self._there)
        self.heal()

    def cut(self, *, to_server: bool = True, from_server: bool = True) -> None:
        """Lose every packet from now on, in one direction or in both."""
        if to_server:
            self._send_to(self.namespace, self._there, self.address, _NOBODY)
        if from_server:
            self._send_to(self._server, self._here, self._node_address, _NOBODY)

    def heal(self) -> None:
        """Let everything through again."""
        self._send_to(self.namespace, self._there, self.address, self._of_server)
        self._send_to(self._server, self._here, self._node_address, self._of_node)

    def part(self, other: Wire) -> None:
        """Lose every packet to another node from now on; what comes from there still does."""
        self._send_to(self.namespace, self.beside, other.peer_address, _NOBODY)

    def join(self, other: Wire) -> None:
        """Let everything through to another node again."""
        own = _hardware_address(other.namespace, other.beside)
        self._send_to(self.namespace, self.beside, other.peer_address, own)

    def pids(self) -> list[int]:
        """Return every process of the node."""
        return [int(word) for word in ip("netns", "pids", self.namespace).split()]

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every process of the node."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _send_to(self, namespace: str, device: str, address: str, hardware: str) -> None:
        ip("-n", namespace, "neigh", "replace", address, "lladdr", hardware, "dev", device, "nud", "permanent")


class Network:
    """The server's namespace and those of nodes; all of them are removed at the end, with the processes in them."""

    def __init__(self) -> None:
        self.server = f"sgpu-{os.getpid()}-{next(_NAMES)}"
        self._wires: list[Wire] = []

    def __enter__(self) -> Network:
        ip("netns", "add", self.server)
        ip("-n", self.server, "link", "set", "lo", "up")
        ip("-n", self.server, "link", "add", _BRIDGE, "up", "type", "bridge")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for wire in self._wires:
            wire.signal_all(signal.SIGKILL)
        for namespace in (*(wire.namespace for wire in self._wires), self.server):
            ip("netns", "del", namespace)

    def wire(self) -> Wire:
        """Return a node's namespace, with a wire to the server."""
        self._wires.append(Wire(self.server, len(self._wires) + 1))
        return self._wires[-1]

    @property
    def names(self) -> list[str]:
        """Return the addresses under which the server may be reached."""
        return [wire.address for wire in self._wires]


def entering(namespace: str) -> list[str]:
    """Return the words before a command that has it run in a namespace; what else it sees stays as it is."""
    return ["nsenter", f"--net={_path(namespace)}"]


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Be in a namespace with this thread; sockets and threads that are made there stay there."""
    with Path("/proc/thread-self/ns/net").open("rb") as before, _path(namespace).open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _path(namespace: str) -> Path:
    return Path("/run/netns", namespace)


def _hardware_address(namespace: str, device: str) -> str:
    words = ip("-n", namespace, "-o", "link", "show", device).split()
    return words[words.index("link/ether") + 1]
