"""The harness itself: what it says of a Ray that is there, and that it says nothing of one that is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.e2e.ray.remains import Footprint, _address
from tests.support.local.observe import wait_for

MARK = "SGPU_TEST_FOOTPRINT"

_LEAVES = """
import socket, subprocess, sys
with socket.create_server((sys.argv[1], 0)) as sock:
    file = open(sys.argv[2], "w")
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    subprocess.Popen(command, env={}, start_new_session=True, stdout=subprocess.DEVNULL)
    print("there", flush=True)
    sys.stdin.read()
"""


def leaver(value: str, path: Path, address: str = "127.0.0.1") -> subprocess.Popen[str]:
    """Start a process that listens, holds a file and has a child without its environment; return when it does."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _LEAVES, address, str(path)],
        env={MARK: value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def test_a_process_its_port_its_file_and_its_children_are_told(tmp_path: Path) -> None:
    footprint = Footprint(f"{MARK}=told")
    path = Path("/tmp", f"sg-footprint-{os.getpid()}")
    process = leaver("told", path)
    try:
        footprint.look()
        assert len(footprint.processes) == 2, footprint.processes
        (listener,) = footprint.listeners.values()
        assert listener.private and str(process.pid) not in listener.owner
        process.kill()
        process.communicate()
        left = footprint.left()
        assert any("time.sleep(600)" in line for line in left), "the child is still there, without its parent"
        assert any(line == f"{path} is there" for line in left)
        assert not any("listened" in line for line in left), "the port went with its owner"
        footprint.end()
        wait_for(lambda: not footprint.alive(), "the child is gone")
        path.unlink()
        assert footprint.left() == []
    finally:
        footprint.end()
        path.unlink(missing_ok=True)


def test_strangers_are_not_told(tmp_path: Path) -> None:
    stranger = leaver("another", tmp_path / "file")
    footprint = Footprint(f"{MARK}=mine", allowed=(str(tmp_path),)).look()
    try:
        assert footprint.processes == {} and footprint.left() == []
    finally:
        strangers = Footprint(f"{MARK}=another").look()
        strangers.end()
        stranger.communicate()


def test_shared_memory_that_nobody_holds_is_told() -> None:
    footprint = Footprint(f"{MARK}=shared")
    path = Path("/dev/shm", f"sg-footprint-{os.getpid()}")
    with open(path, "wb"):
        assert not any(str(path) in line for line in footprint.left()), "somebody holds it"
    try:
        assert f"{path} is nobody's" in footprint.left()
    finally:
        path.unlink()


def test_a_listener_of_all_addresses_is_not_private(tmp_path: Path) -> None:
    footprint = Footprint(f"{MARK}=wide", allowed=(str(tmp_path),))
    process = leaver("wide", tmp_path / "file", address="0.0.0.0")
    try:
        (listener,) = footprint.look().listeners.values()
        assert (listener.address, listener.private) == ("0.0.0.0", False)
    finally:
        footprint.end()
        process.communicate()


def test_addresses_are_read_as_the_kernel_writes_them() -> None:
    footprint = Footprint(f"{MARK}=none")
    with socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        sock.listen()
        footprint.remember(os.getpid())
        port = sock.getsockname()[1]
        found = [listener for listener in footprint.listeners.values() if listener.port == port]
    assert [(listener.address, listener.private) for listener in found] == [("::1", True)]
    assert _address("0100007F") == _address("0000000000000000FFFF00000100007F") == "127.0.0.1"
    assert _address("00000000000000000000000000000000") == "::"
