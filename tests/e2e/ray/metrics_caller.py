"""A program that runs a Ray driver until its node has told of what it did, and prints the run's series as JSON."""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from serverless_gpu.ray import ray_launch

LIMIT_S = 90.0
FINISHED = 6
OBJECT_BYTES = 20_000_000


class Actor:
    """An actor that has a GPU."""

    def done(self) -> None:
        """Do nothing."""


def task() -> int:
    """Return nothing in particular."""
    return os.getpid()


def drive() -> int:
    """Use the cluster, wait until its metrics say so, return the size of an object that it had meanwhile."""
    ray: Any = importlib.import_module("ray")  # here only: the calling program needs none
    ray.init()
    actor = ray.remote(Actor).options(num_gpus=1).remote()
    kept = ray.put(bytes(OBJECT_BYTES))
    ray.get([actor.done.remote(), *(ray.remote(task).remote() for _ in range(FINISHED))])
    runs = Path(os.environ["SERVERLESS_GPU_HOME"]) / "runs"
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        time.sleep(0.1)
        for path in runs.glob("*/*/ray/0.metrics.json"):
            figures = json.loads(path.read_bytes())["figures"]
            if figures.get("tasks_finished", 0) >= FINISHED and figures.get("gpus_used") == 1:
                time.sleep(2.5)  # the home's monitor looks once a second
                return len(ray.get(kept))
    raise TimeoutError(f"nothing told after {LIMIT_S:g} s")


if __name__ == "__main__":
    run = ray_launch(gpus=2, gpu_type="H100")(drive).submit()
    run.wait()
    run.result()
    print(json.dumps({name: values[-1] for name, (_, values) in run.metrics().items()}))
