"""How the server is: for `sgpu status`, which goes on without one, and without one that answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from serverless_gpu.cli.runs.server_runs import sentence_of
from serverless_gpu.cli import server_connection
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import NotAllowed, ServerlessGpuError, ServerNotConfigured
from serverless_gpu.lazy_import import load
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State

_RUNS_MAX = 500
_WAITS_MAX = 3


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the server."""

    url: str
    ok: bool
    problem: str = ""  # why it is unusable, or ""
    principal: str = ""  # the caller's; "" where unknown
    version: str = ""
    waiting: int = 0  # visible queued runs
    going: int = 0  # visible running runs
    waits: tuple[str, ...] = ()  # sentences of a few of the caller's queued runs, oldest first
    nodes: dict[str, int] | None = None  # by state; None where the caller may not see them
    draining: str = ""  # who drains it and why, or ""
    unwell: tuple[str, ...] = ()  # its own complaints although it answers
    checks: dict[str, float] = {}  # milliseconds by part

    def lines(self) -> Iterator[str]:
        """Yield the state as text."""
        if not self.ok:
            yield f"server: {self.url or 'cannot be used'}: {self.problem}; `sgpu doctor` looks"
            return
        how = "unwell" if self.unwell else "ok"
        yield f"server: {self.url} · {how} · {self.version} · you are {self.principal}"
        for problem in self.unwell:
            yield f"  {problem}; `sgpu server logs` there says more"
        if looked := [f"{name} {ms:.0f} ms" for name, ms in self.checks.items() if ms]:
            yield f"health: {', '.join(looked)}"
        yield f"queue: {self.going} going on, {self.waiting} waiting"
        yield from (f"  {wait}" for wait in self.waits)
        if self.nodes is not None:
            counts = ", ".join(f"{count} {state}" for state, count in sorted(self.nodes.items()))
            yield f"nodes: {counts or 'none has joined'}"
        if self.draining:
            yield f"drained by {self.draining}: nothing new is started until `sgpu server resume`"


def server_status(home: Path) -> ServerState | None:
    """Return the state of a home's server without waiting for it; None without a server."""
    url = ""
    try:
        profile = find_profile(home, os.environ)
        url = profile.url
        connection = server_connection.connect(profile)
    except ServerNotConfigured as error:
        is_lacking = not (home / "server.json").exists() and not os.environ.get("SERVERLESS_GPU_SERVER")
        return None if is_lacking else ServerState(url=url, ok=False, problem=error.message)
    except ServerlessGpuError as error:
        return ServerState(url=url, ok=False, problem=error.message)
    state, runs = load("serverless_gpu.wire.state"), load("serverless_gpu.wire.runs")
    principals, agents = load("serverless_gpu.wire.access"), load("serverless_gpu.wire.agents")
    try:
        health = connection.health()
        version = connection.ask("GET", "/version", answer=state.Version)
        me = connection.ask("GET", "/whoami", answer=principals.PrincipalView)
        live = ",".join(each.value for each in State if each not in TERMINAL)
        query = {"state": live, "limit": str(_RUNS_MAX)}
        found = connection.ask("GET", "/runs", answer=runs.RunPage, query=query).runs
        nodes: dict[str, int] | None = None
        draining = ""
        with contextlib.suppress(NotAllowed):
            states = [node.state for node in connection.ask("GET", "/nodes", answer=agents.NodeList).nodes]
            nodes = {each: states.count(each) for each in dict.fromkeys(states)}
            drain = connection.ask("GET", "/drain", answer=state.DrainView)
            draining = f"{drain.by}{f' ({drain.note})' if drain.note else ''}" if drain.on else ""
    except ServerlessGpuError as error:
        return ServerState(url=url, ok=False, problem=error.message)
    finally:
        connection.close()
    queued = [run for run in found if run.state is State.QUEUED]
    own = [run for run in reversed(queued) if run.owner == me.name]
    waits = [f"{run.name or run.id} waits: {sentence_of(run)}" for run in own[:_WAITS_MAX]]
    if len(own) > _WAITS_MAX:
        waits.append(f"and {len(own) - _WAITS_MAX} more of yours: `sgpu runs --state QUEUED`")
    return ServerState(
        url=url,
        ok=True,
        principal=f"{me.name} ({me.role})",
        version=version.version,
        waiting=len(queued),
        going=len(found) - len(queued),
        waits=tuple(waits),
        nodes=nodes,
        draining=draining,
        unwell=health.problems,
        checks={check.name: check.ms for check in health.checks},
    )
