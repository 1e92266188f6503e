"""The same rounds as in `ours`, as one would do without us. Each function returns milliseconds."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import ranks
from benchmarks.ranks import GIGABYTE, RANKS, now_ns, stamps

_RANKS_PROGRAM = str(Path(ranks.__file__))


def bare_fork(directory: str) -> dict[str, object]:
    """Fork both ranks from this process, which has torch, a trial fork and a frozen heap behind it."""
    _get_ready_to_fork()
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        called_ns = now_ns()
        children = [_fork_rank(rank, port, directory) for rank in range(RANKS)]
        for child in children:
            os.waitpid(child, 0)
        returned_ns = now_ns()
    return {"ms": _last(directory, "ready", called_ns), "returned_ms": (returned_ns - called_ns) / 1e6}


def torchrun(directory: str) -> dict[str, object]:
    """`torchrun --standalone` with a program that does the same."""
    called_ns = now_ns()
    subprocess.run(_torchrun("join", directory), check=True)
    return {"ms": _last(directory, "ready", called_ns)}


def torchrunx(directory: str) -> dict[str, object]:
    """torchrunx, which joins the process group before it calls the function."""
    package = importlib.import_module("torchrunx")
    launcher = package.Launcher(hostnames=["localhost"], workers_per_host=RANKS, backend="gloo")
    called_ns = now_ns()
    launcher.run(ranks.joined, directory)
    return {"ms": _last(directory, "ready", called_ns)}


def accelerate(directory: str) -> dict[str, object]:
    """accelerate's `notebook_launcher`, which forks from this process."""
    package = importlib.import_module("accelerate")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    called_ns = now_ns()
    package.notebook_launcher(ranks.join, (directory,), num_processes=RANKS, use_port=str(port))
    returned_ns = now_ns()
    return {"ms": _last(directory, "ready", called_ns), "returned_ms": (returned_ns - called_ns) / 1e6}


def import_torch(directory: str) -> dict[str, object]:
    """A fresh interpreter that imports torch and torch.distributed: the whole command, and until it has imported."""
    stamp = "import time; print(time.clock_gettime_ns(time.CLOCK_BOOTTIME))"
    called_ns = now_ns()
    subprocess.run([sys.executable, "-c", "import torch, torch.distributed"], check=True)
    ended_ns = now_ns()
    program = f"import torch, torch.distributed; {stamp}"
    again_ns = now_ns()
    printed = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE).stdout
    return {"ms": (ended_ns - called_ns) / 1e6, "imported_ms": (int(printed) - again_ns) / 1e6}


def torchrun_killed_beside_sleeper(directory: str) -> dict[str, object]:
    """Rank 1 of torchrun is killed while rank 0 sleeps; until torchrun has ended."""
    return _torchrun_killed("die_beside_sleeper", directory)


def torchrun_killed_beside_collective(directory: str) -> dict[str, object]:
    """Rank 1 of torchrun is killed while rank 0 waits in a collective; until torchrun has ended."""
    return _torchrun_killed("die_beside_collective", directory)


def torchrun_stopped(directory: str) -> dict[str, object]:
    """SIGTERM to torchrun while both ranks sleep; until it has ended."""
    process = subprocess.Popen(_torchrun("nap", directory))
    for rank in range(RANKS):
        ranks.await_stamp(directory, "enter", rank)
    time.sleep(ranks.SETTLED_S)
    stopped_ns = now_ns()
    process.send_signal(signal.SIGTERM)
    process.wait()
    return {"ms": (now_ns() - stopped_ns) / 1e6}


def pickled_tensor(directory: str) -> dict[str, object]:
    """A process pickles a tensor of 1 GB to a file, this one loads it; clocks as in `ours.tensor`.

    A process of its own and not a fork: reading the last round's tensor was a parallel region, after which the threads
    that a forked child would wait for do not exist.
    """
    path = os.path.join(directory, "value.pkl")
    process = subprocess.Popen([sys.executable, _RANKS_PROGRAM, "pickle_tensor", directory])
    ranks.await_stamp(directory, "pickled", 0)
    value = _unpickle_from(path)
    got_ns = now_ns()
    ranks.read(value)
    read_ns = now_ns()
    (made_ns,) = stamps(directory, "made", 1)
    process.wait()
    os.unlink(path)
    os.sync()
    return {
        "ms": (got_ns - made_ns) / 1e6,
        "read_ms": (read_ns - made_ns) / 1e6,
    }


def pickle_tensor(directory: str) -> dict[str, object]:
    """Pickle a tensor of 1 GB to a file and load it, in one process."""
    value = ranks.make_tensor(directory, GIGABYTE)
    path = os.path.join(directory, "value.pkl")
    started_ns = now_ns()
    ranks.pickle_to(path, value)
    loaded = _unpickle_from(path)
    got_ns = now_ns()
    ranks.read(loaded)
    read_ns = now_ns()
    os.unlink(path)
    os.sync()
    return {"ms": (got_ns - started_ns) / 1e6, "read_ms": (read_ns - started_ns) / 1e6}


def drained_pipe(directory: str) -> dict[str, object]:
    """A child writes 4 GiB into a pipe, this process reads it and writes it to /dev/null."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_fd)
            ranks.stamp(directory, "flooding", 0)
            ranks.pour(write_fd, ranks.FLOOD_BYTES)
            ranks.stamp(directory, "flooded", 0)
        finally:
            os._exit(0)
    os.close(write_fd)
    with open(os.devnull, "wb", buffering=0) as null:
        while data := os.read(read_fd, 1 << 16):
            null.write(data)
    os.close(read_fd)
    os.waitpid(child, 0)
    (begun_ns,), (ended_ns,) = stamps(directory, "flooding", 1), stamps(directory, "flooded", 1)
    return {"ms": (ended_ns - begun_ns) / 1e6, "gb_per_s": ranks.FLOOD_BYTES / (ended_ns - begun_ns)}


def imports(directory: str) -> dict[str, object]:
    """Three fresh interpreters in turn: nothing, the package, the decorator."""
    programs = {
        "pass": "pass",
        "package": "import serverless_gpu",
        "decorator": "from serverless_gpu import distributed",
    }
    times: dict[str, float] = {}
    for name, program in programs.items():
        started_ns = now_ns()
        subprocess.run([sys.executable, "-c", program], check=True, cwd=directory)
        times[f"{name}_ms"] = (now_ns() - started_ns) / 1e6
    return {"ms": times["package_ms"] - times["pass_ms"], **times}


def _get_ready_to_fork() -> None:
    if gc.get_freeze_count():
        return
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    gc.collect()
    gc.freeze()


def _fork_rank(rank: int, port: int, directory: str) -> int:
    child = os.fork()
    if child == 0:
        try:
            variables = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in variables.items()})
            torch.set_num_threads(1)  # as every launcher here makes its ranks do
            ranks.join(directory)
        finally:
            os._exit(0)
    return child


def _torchrun(action: str, directory: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    return [*launcher, _RANKS_PROGRAM, action, directory]


def _torchrun_killed(action: str, directory: str) -> dict[str, object]:
    process = subprocess.Popen(_torchrun(action, directory))
    if process.wait() == 0:
        raise RuntimeError("a killed rank went unnoticed")
    ended_ns = now_ns()
    killed_ns = int((Path(directory) / "killed-1").read_text(encoding="ascii"))
    return {"ms": (ended_ns - killed_ns) / 1e6}


def _last(directory: str, event: str, called_ns: int) -> float:
    return (max(stamps(directory, event, RANKS)) - called_ns) / 1e6


def _unpickle_from(path: str) -> torch.Tensor:
    with open(path, "rb") as file:
        value: torch.Tensor = pickle.load(file)
    return value
