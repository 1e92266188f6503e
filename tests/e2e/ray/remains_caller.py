"""A program that calls a Ray driver which behaves as it is told: `remains_caller.py WHERE ACT [OPTIONS as JSON]`.

It runs in the user's environment, where Ray is. The driver uses its cluster first (a task, an actor, an object,
processes that leave their parents), writes `ready` with what it knows of itself, and then does what was asked. The last
line this program prints is how the call ended, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serverless_gpu.ray import ray_launch

STAY_S = 120.0
OBJECT_BYTES = 10_000_000


class Actor:
    """An actor that can tell where it is."""

    def pid(self) -> int:
        """Return its pid."""
        leave_child()
        return os.getpid()


def task() -> str:
    """Return the GPU that it has."""
    leave_child()
    return os.environ["CUDA_VISIBLE_DEVICES"]


def never() -> None:
    """Return later than any test waits."""
    time.sleep(STAY_S)


def drive(where: str, act: str) -> str:
    """Use the cluster, say so, do what was asked."""
    ray: Any = importlib.import_module("ray")  # here only: the calling program needs none
    ray.init()
    actor = ray.remote(Actor).remote()
    kept = ray.put(bytes(OBJECT_BYTES))
    leave_child()
    pid, gpu = ray.get([actor.pid.remote(), ray.remote(num_gpus=1)(task).remote()])
    told = {"actor": pid, "gpu": gpu, "resources": ray.cluster_resources(), "environ": dict(os.environ)}
    say(where, "ready", told)

    def stay() -> None:
        wait_for_file(where, "go")
        say(where, "after", {"actor": ray.get(actor.pid.remote()), "kept": len(ray.get(kept))})

    def stop() -> None:
        wait_for_file(where, "go")
        for command in (["stop"], ["stop", "--force"]):
            subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *command], check=False, timeout=STAY_S)
        ray.get(actor.pid.remote())

    def fail() -> None:
        raise ValueError("from the driver")

    acts: dict[str, Callable[[], object]] = {
        "return": lambda: None,
        "raise": fail,
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "get": lambda: ray.get(ray.remote(num_cpus=0)(never).remote()),
        "stay": stay,
        "stop": stop,
    }
    acts[act]()
    return "done"


def leave_child() -> None:
    """Start a process that leaves its session and has none of our variables."""
    command = [sys.executable, "-S", "-c", f"import time; time.sleep({5 * STAY_S})"]
    quiet = subprocess.DEVNULL
    subprocess.Popen(command, env={}, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)


def say(where: str, name: str, what: object) -> None:
    """Write a file that is whole as soon as it is there."""
    path = Path(where, name)
    path.with_suffix(".part").write_text(json.dumps(what), encoding="utf-8")
    path.with_suffix(".part").rename(path)


def wait_for_file(where: str, name: str) -> None:
    """Wait until a file is there."""
    until = time.monotonic() + STAY_S
    while not Path(where, name).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{name} did not come")
        time.sleep(0.02)


def main(where: str, act: str, options: str = "{}") -> None:
    """Call, and print how it ended."""
    outcome: dict[str, object] = {}
    try:
        outcome["results"] = ray_launch(**{"gpus": 2, **json.loads(options)})(drive).distributed(where, act)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the caller got
        outcome["error"] = type(error).__name__
        outcome["reason"] = getattr(error, "reason", "")
        outcome["text"] = "\n".join([str(error), *getattr(error, "__notes__", ())])
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
