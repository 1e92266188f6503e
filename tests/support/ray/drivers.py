"""What tests have a driver do."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from serverless_gpu import runtime


def ray_module() -> Any:
    """Return Ray, which the process that runs the tests does not have."""
    return importlib.import_module("ray")


def look_around() -> dict[str, object]:
    """Return what a driver and tasks of its see."""
    ray = ray_module()
    ray.init()

    def task() -> tuple[int, str, str, str]:
        return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], os.getcwd(), os.environ["RAY_ADDRESS"]

    on_gpu = ray.remote(num_gpus=1)(task)
    print("the driver runs")
    return {
        "pid": os.getpid(),
        "tasks": ray.get([on_gpu.remote() for _ in range(2)]),
        "resources": ray.cluster_resources(),
        "address": ray.nodes()[0]["NodeManagerAddress"],
        "variables": {name: value for name, value in os.environ.items() if name.startswith(("RAY_", "RANK"))},
        "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    }


def fail_in_a_task() -> None:
    """Raise what a task raised."""
    ray = ray_module()
    ray.init()

    def task() -> None:
        raise ValueError("raised in a task")

    ray.get(ray.remote(task).remote())


def die() -> None:
    """End as if the kernel had run out of memory."""
    ray_module().init()
    os.kill(os.getpid(), signal.SIGKILL)


def wait() -> None:
    """Wait for a task that does not end, in Python: no error of Ray's comes through."""
    ray_module().init()
    print("waits", flush=True)
    while True:
        time.sleep(1)


def return_after(path: str) -> str:
    """Return once a file is there."""
    ray_module().init()
    print("waits", flush=True)
    while not Path(path).exists():
        time.sleep(0.01)
    return "done"


def never_leave(path: str) -> str:
    """Return once a file is there, and say goodbye for ever."""
    atexit.register(time.sleep, 600)
    return return_after(path)


def leave_orphans(path: str) -> str:
    """Have processes lose their parent and end, then return once a file is there."""
    for _ in range(20):
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(0.05)
            os._exit(0)
        os.wait()
    print("orphans", flush=True)
    while not Path(path).exists():
        time.sleep(0.01)
    return "done"


def save_when_asked_to_stop(first: str) -> str:
    """Return what a driver returns that asks whether it is to stop, before it connects or after that."""
    ray = ray_module()
    if first == "asks":
        assert not runtime.should_stop()
    ray.init()
    assert not runtime.should_stop()
    print("waits", flush=True)
    while not runtime.should_stop():
        time.sleep(0.01)
    return "saved"


def never() -> None:
    """Raise: a driver that must not start has started."""
    raise AssertionError("the function was called")


def visit_nodes(count: int) -> dict[str, object]:
    """Return what tasks saw that take all GPUs of a node each."""
    ray = ray_module()
    ray.init()

    def task() -> tuple[str, list[str]]:
        own = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
        return address, sorted(os.environ["CUDA_VISIBLE_DEVICES"].split(","))

    visits = [ray.remote(num_gpus=2)(task).remote() for _ in range(count)]
    return {
        "nodes": sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]),
        "visits": ray.get(visits),
        "resources": ray.cluster_resources(),
    }


def wait_on_every_node(count: int) -> None:
    """Wait for tasks that do not end and hold all GPUs of a node each."""
    ray = ray_module()
    ray.init()

    def task(where: str) -> None:
        with open(where, "w", encoding="ascii"):
            time.sleep(600)

    waits = [ray.remote(num_gpus=2, max_retries=0)(task).remote(os.path.abspath(f"began-{n}")) for n in range(count)]
    ray.get(waits)
