"""Fixtures of every test: a home of its own, and no way out to the network.

A test that starts an agent takes `home`; the agent of that home is ended with the test. Connections and listening
sockets are limited to loopback and Unix sockets, by a guard of our own in this process (child processes are not
guarded).
"""

from __future__ import annotations

import gc
import importlib
import ipaddress
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import progress
from tests.support.homes import PRELOAD, use_home

LONG = tuple(f"tests/e2e/{part}/" for part in ("chaos", "crash", "fuzz", "network", "rows", "simulation"))
"""Parts that take minutes: `make test` leaves them out, `make test-spot` runs a few of their tests."""

# Socket methods that reach out (or let in); the address is the last positional argument of each.
_GUARDED = ("bind", "connect", "connect_ex", "sendto")

# Also for fixtures of a module or a session, which start servers and nodes before a test has its home.
os.environ["SERVERLESS_GPU_PRELOAD"] = PRELOAD

# How long an example takes says how busy the machine is, and nothing about the code.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")

# `nohup make test &` ignores SIGINT, and children would inherit that: tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Show progress beside the output that `make test` holds back."""
    lines = progress.from_variables(os.environ)
    if lines is not None:
        config.pluginmanager.register(lines, "progress")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long parts, and run the tests of object stores last.

    obstore leaves threads behind, and a process with threads must not fork.
    """
    for item in items:
        if item.nodeid.startswith(LONG):
            item.add_marker("long")
    items.sort(key=lambda item: "/environment/stores/" in item.nodeid)


def pytest_collection_finish() -> None:
    """Leave the collected tests out of garbage collections: they live to the end, and each look at them takes time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a fresh SERVERLESS_GPU_HOME with a short path, and end its agent afterwards."""
    # Not under tmp_path: a Unix socket's path may have 107 bytes at most.
    directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    use_home(monkeypatch, directory)
    try:
        yield directory
    finally:
        if (directory / "agent.log").exists() or (directory / "uplink.log").exists():
            # Loaded late: most tests have no agent and need not load the package's doors.
            importlib.import_module("serverless_gpu.testing").stop_agent(directory)
        if (directory / "mlflow").exists():
            serving = importlib.import_module("serverless_gpu.node.mlflow_server.server")
            serving.stop_servers(importlib.import_module("serverless_gpu.node.base.home").Home(directory))
        shutil.rmtree(directory, ignore_errors=True)


class NetworkRefused(AssertionError):
    """A test tried to leave this machine."""


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Refuse every address of this process but loopback and Unix sockets."""
    originals = {name: getattr(socket.socket, name) for name in _GUARDED}
    for name, original in originals.items():
        setattr(socket.socket, name, _guarded(name, original))
    try:
        yield
    finally:
        for name in originals:
            # They are inherited from the C class; ours stood in front of them.
            delattr(socket.socket, name)


def _guarded(name: str, original: Callable[..., object]) -> Callable[..., object]:
    def guarded(self: socket.socket, *args: object) -> object:
        if args and not _stays_here(self.family, args[-1]):
            raise NetworkRefused(
                f"socket.{name}({args[-1]!r}): tests may use 127.0.0.1, ::1, localhost or a Unix socket"
            )
        return original(self, *args)

    return guarded


def _stays_here(family: int, address: object) -> bool:
    if family == socket.AF_UNIX:
        return True
    if family not in (socket.AF_INET, socket.AF_INET6) or not isinstance(address, tuple):
        return False
    host = str(address[0])
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
