"""Rounds over two nodes of a pool of ours: `sgpu up --engine ray` and `sgpu join`, in two homes.

Each has an address of the loopback interface and two declared GPUs; the interpreter is one that has Ray (`.venv/ray`).
A node is lost as machines are: all of its processes at once, without a word.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import ranks
from benchmarks.contestants import ContestantFailed
from benchmarks.databases import held
from benchmarks.ranks import now_ns
from benchmarks.trainers import RANKS, await_all, free_block, kill, pids, since
from serverless_gpu import Run, distributed
from serverless_gpu.engines.ray import ray_machine
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.start_stop import stop_all
from serverless_gpu.testing import stop_agent

_FAKES = "H100:2"
_STANDS_BY = ("sgpu-agent", "sgpu-nursery", "sgpu-supervisor", "sgpu-zygote", "sgpu-stem", "sgpu-restore")
_FIRST, _SECOND = "127.0.0.2", "127.0.0.3"
_STARTED_S = 180.0
_ENDED_S = 60.0
_over_both = distributed(gpus=RANKS, gpu_type="H100", remote=True, env="snapshot", quiet=True, grace=2)
_join, _meet_until_lost = _over_both(ranks.join), _over_both(ranks.meet_until_lost)


def warm(directory: str) -> dict[str, object]:
    """Call with everything standing by on both nodes; until all four ranks are in the process group."""
    _pool()
    return _called(directory)


def cold(directory: str) -> dict[str, object]:
    """The same when neither node has an agent or a zygote."""
    pool = _pool()
    for machine in pool.machines:
        machine.kill_agent()
    return _called(directory)


def lost(directory: str) -> dict[str, object]:
    """The second node dies while its ranks are in a collective; until the caller has an exception."""
    pool = _pool()
    run = _meet_until_lost.submit(directory)
    await_all(directory, "ready")
    time.sleep(ranks.SETTLED_S)
    began_ns = now_ns()
    pool.second.kill()
    said = _failure(run)
    times: dict[str, object] = {"ms": (now_ns() - began_ns) / 1e6}
    pool.join_again()
    return times if pool.second.name in said else {**times, "note": f"it did not name the node: {said}"}


# --- ours -------------------------------------------------------------------------------------------------------------


class _Machine:
    """A machine of our pool: a home, and a command that goes on.

    Args:
        home: `$SERVERLESS_GPU_HOME`.
        name: of the node; "" for that of the server's own.
        address: of the node.
    """

    def __init__(self, home: Path, name: str, address: str) -> None:
        self.home, self.name, self.address = home, name, address
        self.port = free_block()
        self.process: subprocess.Popen[bytes] | None = None
        home.mkdir(mode=0o700, exist_ok=True)

    def start(self, *arguments: str, ready: str) -> None:
        """Start the command; wait until it has said a text."""
        said = self.home / "said"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVERLESS_GPU_"))}
        with said.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serverless_gpu.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **kept,
                    "SERVERLESS_GPU_HOME": str(self.home),
                    "SERVERLESS_GPU_FAKE": _FAKES,
                },
            )
        _wait(lambda: ready in said.read_text(errors="replace"), self.process, said)

    def kill_agent(self) -> None:
        """Kill the agent and all that stands by; the uplink goes on."""
        kill([pid for pid in pids(str(self.home)) if Path(f"/proc/{pid}/comm").read_text().strip() in _STANDS_BY])

    def kill(self) -> None:
        """Kill everything of it at once, as when the machine loses power."""
        kill([*pids(str(self.home)), *pids(self._ray)])

    def end(self) -> None:
        """End everything of it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_ENDED_S)
        stop_all(Home(self.home))
        stop_agent(self.home)
        self.kill()
        shutil.rmtree(Path(self._ray).parent, ignore_errors=True)

    @property
    def _ray(self) -> str:
        return ray_machine.directory_of(self.home / ("ray" if self.name else "server/ray"))


class _Pool:
    """A server with Ray's head, which is a node, too, and one machine that has joined."""

    def __init__(self) -> None:
        files = Path(os.environ["SERVERLESS_GPU_HOME"]).parent
        self.first = _Machine(files / "first", "", _FIRST)
        self.second = _Machine(files / "second", "second", _SECOND)
        os.environ["SERVERLESS_GPU_HOME"] = str(self.first.home)  # the other contestant is in the one that it was
        self.machines = (self.first, self.second)
        for machine in self.machines:
            held.callback(machine.end)
        ray = ("--engine", "ray", "--node-address", _FIRST, "--ray-port", str(self.first.port))
        self.first.start("up", *ray, "--port", "0", ready="Ray at")
        self.join_again()

    def join_again(self) -> None:
        """Have the second machine join, and wait until it can be used."""
        machine = self.second
        join_file = machine.home / "join.json"
        join_file.unlink(missing_ok=True)
        shutil.copy(self.first.home / "server" / "join.json", join_file)
        where = ("--token-file", str(join_file), "--name", machine.name, "--node-address", _SECOND)
        machine.start("join", _FIRST, *where, "--ray-port", str(machine.port), ready="to the pool of")
        _wait(self._is_whole, machine.process, machine.home / "said")

    def _is_whole(self) -> bool:
        command = [sys.executable, "-m", "serverless_gpu.cli", "nodes", "--json"]
        said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        return sum(node["state"] == "UP" for node in json.loads(said)) == 2


@functools.cache
def _pool() -> _Pool:
    """Start the pool; it ends with the contestant."""
    return _Pool()


def _called(directory: str) -> dict[str, object]:
    called_ns = now_ns()
    run = _join.submit(directory)
    run.follow()
    run.results()
    times = since(called_ns, directory, returned_ns=now_ns())
    run.receipt()
    return times


def _failure(run: Run[None]) -> str:
    try:
        run.results(_STARTED_S)
    except Exception as error:  # noqa: BLE001 - the ranks' own, or ours
        return " ".join([str(error), *getattr(error, "__notes__", ())])
    raise RuntimeError("a node of it is gone, and the run returned")


def _wait(look: Callable[[], bool], process: subprocess.Popen[bytes] | None, said: Path) -> None:
    until = time.monotonic() + _STARTED_S
    while not look():
        if time.monotonic() > until or process is None or process.poll() is not None:
            raise ContestantFailed(f"it did not start: {said.read_text(errors='replace')[-300:]}")
        time.sleep(0.1)
