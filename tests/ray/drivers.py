"""What tests have a driver do."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any


def ray_module() -> Any:
    """Return Ray, which the process that runs the tests does not have."""
    return importlib.import_module("ray")


def look_around() -> dict[str, object]:
    """Return what a driver and a task of its see."""
    ray = ray_module()
    ray.init()

    def task() -> tuple[int, str, str]:
        return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], os.getcwd()

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


def fail() -> None:
    """Raise, after a task of its raised."""
    ray = ray_module()
    ray.init()

    def task() -> None:
        raise ValueError("raised in a task")

    ray.get(ray.remote(task).remote())


def wait() -> None:
    """Wait for a task that does not end."""
    ray = ray_module()
    ray.init()

    def task() -> None:
        time.sleep(600)

    print("waits", flush=True)
    ray.get(ray.remote(task).remote())
