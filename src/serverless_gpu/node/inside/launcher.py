"""The way into an environment that is mounted: make the mounts, then become its interpreter.

    agent ──▶ clean interpreter: this ──mounts.enter──▶ execve ──▶ the environment's python, a zygote

The mounts belong to this process and to what it turns into; nobody else sees them. What to do comes in a memory file:
arguments and variables would be seen by everybody in a list of processes.

Failure cases, each ends this process with a traceback in the agent's log: the mounts are refused, the interpreter is
not there.
"""

from __future__ import annotations

import json
import os

from . import mounts


def main(plan_fd: int) -> None:
    """Enter mounts and execute a program in them; does not return.

    Args:
        plan_fd: a file with ``mounts``, ``argv`` (the program first) and ``environ``, as JSON.

    Raises:
        OSError: one of them is not possible.
    """
    with open(plan_fd, encoding="utf-8") as file:
        plan = json.load(file)
    mounts.enter(plan["mounts"])
    os.execve(plan["argv"][0], plan["argv"], plan["environ"])
