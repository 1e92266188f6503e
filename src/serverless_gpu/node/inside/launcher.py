"""Enters cgroups, a user namespace and mounts, then executes the user's interpreter as a zygote.

    agent ──▶ clean interpreter: this ── cgroups ── user namespace ── mounts ──▶ execve ──▶ the user's python, a zygote

The user's interpreter runs user code (`.pth` files, `sitecustomize`) before the zygote's first line. The launcher runs
in a clean interpreter to set up the containment before any user code runs. Orphaned processes of the user's start-up
code become children of the zygote. The launcher reads its plan from a memory file, because other processes could read
its arguments and environment variables.

Failure cases:

* If the kernel refuses a cgroup, the agent later kills the zygote's descendants one by one.
* If a zygote for several runs cannot get a user namespace, the agent starts every run cold.
* If a mount fails or the interpreter is missing, the launcher ends with a traceback in the agent's log.
"""

from __future__ import annotations

import contextlib
import json
import os

from . import linux, namespaces, own_uid, protocol, sandbox
from .channel import Channel


def main(plan_fd: int, channel_fd: int) -> None:
    """Enter the containment of a zygote and execute the zygote. Return only if the zygote must not start.

    `plan_fd` is a JSON file with ``cgroups``, ``namespace`` (``""``, ``"wanted"``, ``"required"``), ``mounts``,
    ``argv`` (the program first) and ``environ``. ``view`` contains the fields of `sandbox.View`, or None. ``level`` is
    the isolation level of the view. Raises OSError when a mount or the program fails.
    """
    with open(plan_fd, encoding="utf-8") as file:
        plan = json.load(file)
    if plan["view"] is not None:
        # The launcher opens the cgroups before it enters the sandbox, which hides the cgroups. The keeper of the
        # sandbox stays outside of the cgroups.
        cgroups = open_cgroups(plan["cgroups"])
        enter = sandbox.enter if plan["level"] == protocol.SANDBOX else own_uid.enter
        enter(sandbox.View(**plan["view"]), plan["mounts"])
        linux.become_subreaper()  # execve keeps the subreaper setting.
        join_cgroups(cgroups)
        # The agent later compares this view with the view of the zygote, which runs code of the principal.
        with contextlib.closing(Channel.adopt(os.dup(channel_fd))) as channel:
            view = sandbox.mounts_of("self").decode("utf-8", "surrogateescape")
            channel.send(protocol.encode({"event": "mounts", "view": view}))
        os.execve(plan["argv"][0], plan["argv"], plan["environ"])
    linux.become_subreaper()
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
    """Move this process into cgroups. Return the cgroups that the kernel accepted."""
    entered: list[str] = []
    for path in cgroups:
        with contextlib.suppress(OSError), open(f"{path}/cgroup.procs", "w", encoding="ascii") as file:
            file.write("0")
            file.flush()
            entered.append(path)
    return entered


def open_cgroups(cgroups: list[str]) -> list[int]:
    """Return descriptors through which a process without rights can enter cgroups."""
    found: list[int] = []
    for path in cgroups:
        with contextlib.suppress(OSError):
            found.append(os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
    return found


def join_cgroups(fds: list[int]) -> None:
    """Move this process into the cgroups of `open_cgroups`, and close the descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.write(fd, b"0")
        os.close(fd)
