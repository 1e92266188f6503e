"""Rounds about a Ray cluster that is made for one driver; they run in an interpreter that has Ray (`.venv/ray`).

Each function makes a cluster of one node with 3 CPUs, has the same driver connect to it, and ends everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import ray_driver
from benchmarks.ranks import now_ns, stamps
from serverless_gpu.ray import ray_launch

_CPUS = 3  # two slots and one more, as a run of ours has
_STORE_BYTES = 1 << 30
_ENDING_S = 20.0
_PROGRAM = str(Path(ray_driver.__file__))

_driver = ray_launch(gpus=2, gpu_type="CPU", object_store_memory=_STORE_BYTES, quiet=True)(ray_driver.drive)


def ours(directory: str) -> dict[str, object]:
    """`ray_launch`, everything of ours standing by: its cluster is made for the call."""
    called_ns = now_ns()
    run = _driver.submit(directory)
    run.follow()
    run.results()
    returned_ns = now_ns()
    times = {**_since(called_ns, directory), "returned_ms": (returned_ns - called_ns) / 1e6}
    receipt = run.receipt()
    times["ended_ms"] = (now_ns() - returned_ns) / 1e6
    return times if receipt.warm else {**times, "note": f"started cold: {receipt.warm_reason}"}


def started(directory: str) -> dict[str, object]:
    """`ray start --head`, and when that has returned, a program."""
    with _place() as (variables, files):
        port, client = _free_ports(2)
        options = {
            "port": port,
            "ray-client-server-port": client,
            "include-dashboard": "false",
            "num-cpus": _CPUS,
            "num-gpus": 0,
            "object-store-memory": _STORE_BYTES,
            "temp-dir": files,
        }
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"]
        called_ns = now_ns()
        subprocess.run(
            [*argv, *(f"--{name}={value}" for name, value in options.items())], env=dict(variables), check=True
        )
        head_ns = now_ns()
        connected = {**variables, "RAY_ADDRESS": f"127.0.0.1:{port}"}
        subprocess.run([sys.executable, _PROGRAM, directory], env=connected, check=True)
        return {**_since(called_ns, directory), "head_ms": (head_ns - called_ns) / 1e6}


def initialised(directory: str) -> dict[str, object]:
    """A program that calls `ray.init()` without an address, which makes a cluster of its own."""
    with _place() as (variables, files):
        options = {"num_cpus": _CPUS, "num_gpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        text = json.dumps({**options, "_temp_dir": files})
        called_ns = now_ns()
        subprocess.run([sys.executable, _PROGRAM, directory, text], env=dict(variables), check=True)
        return dict(_since(called_ns, directory))


def _since(called_ns: int, directory: str) -> dict[str, float]:
    at = {event: stamps(directory, event, 1)[0] for event in ("enter", "imported", "ready", "done")}
    return {"ms": (at["ready"] - called_ns) / 1e6} | {
        f"{event}_ms": (at_ns - called_ns) / 1e6 for event, at_ns in at.items() if event != "ready"
    }


@contextlib.contextmanager
def _place() -> Iterator[tuple[Mapping[str, str], str]]:
    """Yield variables by which a Ray can be found, and a directory for it with a short name; end it afterwards."""
    name, value = "SGPU_BENCH_RAY", secrets.token_hex(8)
    files = tempfile.mkdtemp(prefix="sgb-", dir="/tmp")
    kept = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
    token = Path(files, "token")
    token.write_text(secrets.token_hex(32), encoding="ascii")
    token.chmod(0o600)
    ours_too = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on the loopback interface only
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    try:
        yield {**kept, **ours_too, name: value}, files
    finally:
        _end(f"{name}={value}".encode())
        shutil.rmtree(files, ignore_errors=True)


def _end(mark: bytes) -> None:
    """End every process with this in its environment: `ray stop` would end those of others, too."""
    until = time.monotonic() + _ENDING_S
    while time.monotonic() < until:
        found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in _bytes(path)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    raise RuntimeError("the neighbour's Ray does not end")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
