"""The way to a zygote: enter its cgroups, its user namespace and its mounts, then become the user's interpreter.

    agent ──▶ clean interpreter: this ── cgroups ── user namespace ── mounts ──▶ execve ──▶ the user's python, a zygote

An interpreter runs code of the user's before the zygote's own first line: `.pth` files, `sitecustomize`. So everything
that contains it is made here, by a process that has run none. Orphans of that code become children of the zygote.

Namespace and mounts belong to this process and to what it turns into. What to do comes in a memory file: arguments and
variables would be seen by everybody in a list of processes.

Failure cases: a cgroup does not let us in (the agent looks for descendants instead); a zygote that several runs would
share gets no user namespace (said to the agent, which starts runs cold); the mounts are refused or the interpreter is
not there (this process ends with a traceback in the agent's log).
"""

from __future__ import annotations

import contextlib
import json
import os

from . import linux, mounts, protocol, user_namespace
from .channel import Channel


def main(plan_fd: int, channel_fd: int) -> None:
    """Enter what contains a zygote and execute it; does not return, except where it must not be started.

    Args:
        plan_fd: a file with ``cgroups``, ``namespace`` (``""``, ``"wanted"``, ``"required"``), ``mounts``, ``argv``
            (the program first) and ``environ``, as JSON.
        channel_fd: the zygote's channel to the agent.

    Raises:
        OSError: the mounts or the program are not possible.
    """
    with open(plan_fd, encoding="utf-8") as file:
        plan = json.load(file)
    linux.become_subreaper()  # kept by execve
    enter_cgroups(plan["cgroups"])
    if plan["namespace"]:
        problem = user_namespace.probe()
        if not problem:
            user_namespace.enter()
        elif plan["namespace"] == "required":
            reason = f"{protocol.UNSHARED} ({problem})"
            Channel.adopt(channel_fd).send(protocol.encode({"event": "cold", "reason": reason}))
            return
    if plan["mounts"]:
        mounts.enter(plan["mounts"])
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
