"""The way to a zygote: enter cgroups, user namespace and mounts, become the user's interpreter.

    agent ──▶ clean interpreter: this ── cgroups ── user namespace ── mounts ──▶ execve ──▶ the user's python, a zygote

An interpreter runs the user's code (`.pth` files, `sitecustomize`) before the zygote's own first line. So a process
that has run none makes its containment. Orphans of that code become children of the zygote. The plan comes in a memory
file, because every process can list arguments and variables.

Failure cases: a cgroup does not let us in (the agent looks for descendants instead); a zygote that several runs would
share gets no user namespace (the agent starts runs cold); the mounts are refused or the interpreter is not there (this
process ends with a traceback in the agent's log).
"""

from __future__ import annotations

import contextlib
import json
import os

from . import linux, namespaces, protocol
from .channel import Channel


def main(plan_fd: int, channel_fd: int) -> None:
    """Enter what contains a zygote and execute it; returns only where it must not be started.

    `plan_fd` is a JSON file with ``cgroups``, ``namespace`` (``""``, ``"wanted"``, ``"required"``), ``mounts``,
    ``argv`` (the program first) and ``environ``. Raises OSError for impossible mounts or programs.
    """
    with open(plan_fd, encoding="utf-8") as file:
        plan = json.load(file)
    linux.become_subreaper()  # kept by execve
    enter_cgroups(plan["cgroups"])
    if plan["namespace"]:
        problem = namespaces.probe_user_namespace()
        if not problem:
            namespaces.enter_user_namespace()
        elif plan["namespace"] == "required":
            reason = f"{protocol.UNSHARED} ({problem})"
            Channel.adopt(channel_fd).send(protocol.encode({"event": "cold", "reason": reason}))
            return
    if plan["mounts"]:
        namespaces.enter_mounts(plan["mounts"])
    os.execve(plan["argv"][0], plan["argv"], plan["environ"])


def enter_cgroups(cgroups: list[str]) -> list[str]:
    """Move into cgroups and return those that let us in."""
    entered: list[str] = []
    for path in cgroups:
        with contextlib.suppress(OSError), open(f"{path}/cgroup.procs", "w", encoding="ascii") as file:
            file.write("0")
            file.flush()
            entered.append(path)
    return entered
