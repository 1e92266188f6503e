"""The rounds of `pools` as Ray Train does them: `TorchTrainer` on a cluster of two nodes with two CPUs each.

python -m benchmarks.trainers ADDRESS DIRECTORY      a program that connects, and does one
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ranks
from benchmarks.databases import held
from benchmarks.ranks import now_ns, stamp, stamps
from serverless_gpu.engines.ray import ray_machine
from serverless_gpu.node.inside.linux import descendants

RANKS = 4
_HEAD, _WORKER = "127.0.0.4", "127.0.0.5"
_STORE_BYTES = 100 << 20
_STARTED_S = 120.0
_blocks = iter(range(12_000 + os.getpid() % 100 * 200, 32_000, 100))


def warm(directory: str) -> dict[str, object]:
    """A driver that is connected; until all workers are in the process group."""
    _connected()
    called_ns = now_ns()
    _fit(_ready, directory)
    return since(called_ns, directory, returned_ns=now_ns())


def cold(directory: str) -> dict[str, object]:
    """The same by a program, with what it takes to import and to connect."""
    cluster = _cluster()
    called_ns = now_ns()
    command = [sys.executable, "-m", "benchmarks.trainers", cluster.address, directory]
    subprocess.run(command, check=True, env=cluster.environ())
    return since(called_ns, directory, returned_ns=now_ns())


def lost(directory: str) -> dict[str, object]:
    """All processes of the second node are killed while its workers are in a collective; until `fit()` has raised."""
    cluster = _connected()
    began_ns: list[int] = []

    def lose() -> None:
        await_all(directory, "ready")
        time.sleep(ranks.SETTLED_S)
        began_ns.append(now_ns())
        cluster.kill_worker()

    losing = threading.Thread(target=lose, daemon=True)
    losing.start()
    try:
        _fit(_meet_until_lost, directory)
    except Exception:  # noqa: BLE001 - whatever it raises is its answer
        raised_ns = now_ns()
        losing.join()
        cluster.start_worker()
        return {"ms": (raised_ns - began_ns[0]) / 1e6}
    raise RuntimeError("a node of it is gone, and fit() returned")


# --- what both do -----------------------------------------------------------------------------------------------------


def since(called_ns: int, directory: str, *, returned_ns: int) -> dict[str, object]:
    """Return how long it took until the last rank was there, and until the caller went on."""
    return {
        "ms": (max(stamps(directory, "ready", RANKS)) - called_ns) / 1e6,
        "returned_ms": (returned_ns - called_ns) / 1e6,
    }


def await_all(directory: str, event: str) -> None:
    """Return when all ranks have got there."""
    for rank in range(RANKS):
        ranks.await_stamp(directory, event, rank)


def pids(mark: str) -> list[int]:
    """Return the processes, but this one, that have a text in their command or environment, or where they work.

    Those that they have started are among them: what Ray starts writes its title over its environment.
    """
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            texts = [(directory / name).read_bytes() for name in ("cmdline", "environ")]
            texts.append(os.fsencode((directory / "cwd").readlink()))
            if any(mark.encode() in text for text in texts) and int(directory.name) != os.getpid():
                found.update((int(directory.name), *descendants(int(directory.name))))
    return sorted(found)


def kill(some: Sequence[int]) -> None:
    """Kill processes at once: none of them sees another one die, and says so."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in some:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def free_block() -> int:
    """Return the first of a hundred ports that nobody listens on."""
    return next(base for base in _blocks if ray_machine.taken_port(base, "127.0.0.2") is None)


# --- Ray --------------------------------------------------------------------------------------------------------------


class _Cluster:
    """A head and a worker, each with two CPUs."""

    def __init__(self) -> None:
        self.files = Path(tempfile.mkdtemp(prefix="sgb-", dir="/tmp"))
        self._mark = secrets.token_hex(8)
        token = self.files / "token"
        token.write_text(secrets.token_hex(32), encoding="ascii")
        token.chmod(0o600)
        self.address = f"{_HEAD}:{free_block()}"
        self._start("head", _HEAD, "--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false")
        self.start_worker()

    def start_worker(self) -> None:
        """Start the second node."""
        self._start("worker", _WORKER, f"--address={self.address}")

    def _start(self, name: str, address: str, *options: str) -> None:
        base = free_block()
        numbered = ("node-manager-port", "object-manager-port", "dashboard-agent-listen-port", "metrics-export-port")
        common = (
            *(f"--{option}={base + number}" for number, option in enumerate(numbered)),
            *(f"--min-worker-port={base + 10}", f"--max-worker-port={base + 99}"),
            *(f"--node-ip-address={address}", "--num-cpus=2", "--num-gpus=0"),
            *(f"--object-store-memory={_STORE_BYTES}", f"--temp-dir={self.files / name}", "--disable-usage-stats"),
        )
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common]
        subprocess.run(command, check=True, env=self.environ(name), timeout=_STARTED_S)

    def environ(self, name: str = "driver") -> dict[str, str]:
        """Return variables for its processes."""
        kept = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        return kept | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.files / "token"),
            "SGPU_BENCH_NODE": f"{self._mark}-{name}",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }

    def kill_worker(self) -> None:
        """Kill everything of the second node, as when the machine loses power."""
        kill(pids(f"{self._mark}-worker"))

    def end(self) -> None:
        """End everything of it."""
        while some := pids(self._mark):
            kill(some)
            time.sleep(0.1)
        shutil.rmtree(self.files, ignore_errors=True)


@functools.cache
def _cluster() -> _Cluster:
    """Start the cluster; it ends with the contestant."""
    cluster = _Cluster()
    held.callback(cluster.end)
    return cluster


@functools.cache
def _connected() -> _Cluster:
    cluster = _cluster()
    os.environ.update({name: text for name, text in cluster.environ().items() if name.startswith("RAY_")})
    _connect(cluster.address)
    return cluster


def _connect(address: str) -> None:
    ray = importlib.import_module("ray")
    ray.init(address=address, _node_ip_address=address.partition(":")[0], log_to_driver=False)


def _fit(loop: Callable[[dict[str, str]], None], directory: str) -> None:
    """Train on both nodes, and try nothing again."""
    train, torch_trainer = importlib.import_module("ray.train"), importlib.import_module("ray.train.torch")
    torch_trainer.TorchTrainer(
        loop,
        train_loop_config={"directory": directory},
        torch_config=torch_trainer.TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=RANKS, use_gpu=False, placement_strategy="SPREAD"),
        run_config=train.RunConfig(storage_path=directory, failure_config=train.FailureConfig(max_failures=0)),
    ).fit()


def _ready(config: dict[str, str]) -> None:
    """Say that the process group is there: the trainer has made it."""
    stamp(config["directory"], "ready", _rank())


def _meet_until_lost(config: dict[str, str]) -> None:
    stamp(config["directory"], "ready", _rank())
    ranks.meet_for_ever()


def _rank() -> int:
    train: Any = importlib.import_module("ray.train")
    return int(train.get_context().get_world_rank())


if __name__ == "__main__":
    _connect(sys.argv[1])
    _fit(_ready, sys.argv[2])
