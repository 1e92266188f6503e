"""A Ray of somebody else on this machine, started as people start it; and a client that asks a cluster for a task."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.ray.remains import Footprint
from tests.support.local.observe import wait_for

PYTHON = Path(sys.prefix) / "ray" / "bin" / "python"
START_S = 180.0
ASK_S = 90.0

# On loopback, telling nobody, and in no hurry: on a machine with little to spare a head takes longer than Ray waits.
_PLAIN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
}

_ASK = """
import ray

ray.init(log_to_driver=False)

@ray.remote
def double(number):
    return 2 * number

print("answer", ray.get(double.remote(21), timeout=30))
"""


class PlainRay:
    """`ray start --head` outside of any run: default ports but for two that clusters of other tests may have.

    Attributes:
        address: for `RAY_ADDRESS`.
        variables: of whoever belongs to it.
        footprint: what belongs to it.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="sg-outer-", dir="/tmp"))
        mark = f"SGPU_TEST_OUTER={secrets.token_hex(8)}"
        token = self.directory / "token"
        token.write_text(secrets.token_hex(32), encoding="ascii")
        token.chmod(0o600)
        self.variables = {
            **own_variables(),
            **dict([mark.split("=")]),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        self.footprint = Footprint(mark)
        port, client = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        options = {
            "port": port,
            "ray-client-server-port": client,
            "include-dashboard": "false",
            "num-cpus": 1,
            "temp-dir": self.directory / "ray",
            "object-store-memory": 80_000_000,
        }
        argv = [str(PYTHON), "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        with open(self.directory / "output", "wb") as log:
            self._process = subprocess.Popen(
                [*argv, *(f"--{name}={value}" for name, value in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.variables,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it says that it runs."""

        def ready() -> bool:
            text = (self.directory / "output").read_text(encoding="utf-8", errors="replace")
            assert self._process.poll() is None, text
            return "Ray runtime started" in text

        wait_for(ready, "the outer Ray has started", limit_s=START_S)

    def answers(self) -> bool:
        """Return whether a driver that knows its address gets a task done."""
        return ask(self.variables, self.address).stdout.split()[-2:] == ["answer", "42"]

    def end(self) -> None:
        """End all of it."""
        self.footprint.end()
        self._process.wait(50)
        wait_for(lambda: not self.footprint.alive(), "the outer Ray is gone")
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def plain_ray() -> Iterator[PlainRay]:
    """Yield a Ray that has started; end it afterwards."""
    outer = PlainRay()
    try:
        outer.wait_ready()
        yield outer
    finally:
        outer.end()


def ask(variables: Mapping[str, str], address: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Have a driver of its own ask a cluster for one task; it prints "answer 42", or raises."""
    return subprocess.run(
        [str(PYTHON), "-c", _ASK],
        env={**variables, "RAY_ADDRESS": address, **more},
        capture_output=True,
        text=True,
        timeout=ASK_S,
        check=False,
    )


def own_variables() -> dict[str, str]:
    """Return this process's variables without any of Ray's, with those that keep a plain Ray on this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVERLESS_GPU_"))}
    return {**kept, **_PLAIN}


def free_ports(count: int) -> list[int]:
    """Return ports that nobody has at the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
