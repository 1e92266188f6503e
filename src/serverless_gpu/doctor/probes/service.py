"""The agent of this home and how it ends process trees; neither is started or changed.

Where no agent runs, cgroups are looked at as one started from here would find them, and what that makes is removed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from serverless_gpu.client.agent_status import agent_status
from serverless_gpu.doctor.facts import AgentFacts, CgroupFacts, UnknownFact
from serverless_gpu.doctor.probes.bounded_calls import side_by_side
from serverless_gpu.node.base.home import find_home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.base.protocol import Status, agent_socket
from serverless_gpu.node.processes.process_tree import controllers, find_cgroup_root
from serverless_gpu.node.processes.spawn import one_name
from serverless_gpu.version import __version__

_ANSWER_S = 3.0
_PID_BYTES = 20


def look_at_service(environ: Mapping[str, str]) -> tuple[AgentFacts, CgroupFacts | UnknownFact]:
    """Return what the agent says, and what cgroups it uses or would use.

    Raises:
        StorageError: there is no home, or its sockets cannot be had.
    """
    home = find_home(environ)
    sockets = home.sockets()
    others = _others(sockets)
    answer = side_by_side({"agent": lambda: agent_status(home.root)}, _ANSWER_S)["agent"]
    if isinstance(answer, UnknownFact):
        pid = _holder(agent_socket(sockets).with_suffix(".lock")) or "unknown"
        agent = AgentFacts(
            problem=f"the agent (pid {pid}) does not answer: {answer.why}",
            hint=f"kill -9 {pid}   (running attempts go on; the next call starts another agent)",
            others=others,
        )
        return agent, UnknownFact("the agent does not answer")
    if answer is None:
        return AgentFacts(others=others), _cgroups_from_here(environ)
    agent = AgentFacts(
        pid=answer.pid,
        version=__version__,
        python=one_name(sys.executable),
        zygotes=answer.zygotes,
        attempts=len(answer.attempts),
        queued=len(answer.queued),
        others=others,
    )
    return agent, _cgroups_of(answer)


def _cgroups_of(status: Status) -> CgroupFacts:
    path = Path(status.cgroups) if status.cgroups else None
    return CgroupFacts(path=status.cgroups, problem=status.cgroups_problem, controllers=controllers(path))


def _cgroups_from_here(environ: Mapping[str, str]) -> CgroupFacts:
    root = find_cgroup_root(f"serverless_gpu-doctor-{os.getpid()}", environ)
    try:
        path = "" if root.path is None else str(root.path)
        return CgroupFacts(path=path, problem=root.problem, controllers=controllers(root.path))
    finally:
        root.close()


def _others(sockets: Path) -> dict[str, str]:
    """Return agents of other versions or protocols that serve this home, by the locks they hold."""
    found: dict[str, str] = {}
    for path in sorted(sockets.glob("agent-*.lock")):
        pid = _holder(path)
        if path.name != agent_socket(sockets).with_suffix(".lock").name and pid:
            number, _, version = path.name.removeprefix("agent-").removesuffix(".lock").partition("-")
            found[pid] = f"{version}, protocol {number}"
    return found


def _holder(path: Path) -> str:
    """Return the pid of the agent that holds a lock, or "" when it is free."""
    return (held_note(path) or b"")[:_PID_BYTES].decode("ascii", "replace").strip()
