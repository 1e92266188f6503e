"""Attaches to a run by the run's identifier.

`attach` finds a running local run through its supervisor's socket, and an ended local run through its run directory. If
the home directory does not contain the run, `attach` asks the server.

`attach` raises an error for a queued run, because a queued run has no supervisor. A supervisor is unreachable if it
uses another /tmp or another value of SERVERLESS_GPU_SOCKETS. The agent may have deleted an old run's directory.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
from collections.abc import Collection
from pathlib import Path
from typing import cast

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.agent import agent_status
from serverless_gpu.client.runs.run import Run
from serverless_gpu.client.runs.run_source import LocalRun
from serverless_gpu.errors import AgentUnavailable, InvalidOption, InvalidValue, NotFound
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.attempt.history import RunRecord, read_run
from serverless_gpu.node.base.home import Home, find_home
from serverless_gpu.node.base.lock_files import is_held
from serverless_gpu.node.inside.channel import Channel

SNAPSHOT_S = 2.0
_APPEAR_S = 2.0  # Maximum number of seconds between a run's launch and its supervisor's readiness.
_LOOK_S = 0.01


def attach(run_id: str, allow_pickle_from: str | Collection[str] = ()) -> Run[object]:
    """Return the handle of a run that the server or another process of the same user has started.

    Args:
        run_id: the complete identifier of the run.
        allow_pickle_from: other principals of the server whose results this process may load. Loading a result executes
            code of the result's owner.

    Raises:
        InvalidOption: an argument is not a string.
        InvalidValue: no run has this identifier.
        AgentUnavailable: the run continues, but its supervisor is unreachable or has too many attached clients.
    """
    if not isinstance(run_id, str):
        raise InvalidOption(f"attach takes the identifier of a run, a string, not {run_id!r}")
    trusted = (allow_pickle_from,) if isinstance(allow_pickle_from, str) else tuple(allow_pickle_from)
    if not all(isinstance(name, str) for name in trusted):
        raise InvalidOption(f"allow_pickle_from takes names of principals, not {allow_pickle_from!r}")
    home = find_home(os.environ)
    # `attach` accepts only valid identifiers, because the identifier becomes part of a path.
    is_identifier = run_id.isascii() and run_id.isalnum()
    record = read_run(home.runs, run_id) if is_identifier else None
    elsewhere = ""
    if record is None or record.problem or (record.directory / "remote.json").exists():
        try:
            # The client imports the HTTP library only for remote runs, because the import is slow.
            module = importlib.import_module("serverless_gpu.client.remote.remote_run") if is_identifier else None
            run = None if module is None else module.attach(home, run_id, trusted)
        except NotFound:
            run, elsewhere = None, ", nor among the server's runs that you may see"
        if run is not None:
            return cast("Run[object]", run)
    if record is None or record.problem:
        raise InvalidValue(
            f"run {run_id!r} does not exist in {home.runs}{elsewhere}",
            hint="list runs with `sgpu runs`; the agent deletes old runs (`[retention]` in config.toml)",
        )
    return _attach_here(home, record)


def _attach_here(home: Home, record: RunRecord) -> Run[object]:
    run_id, directory = record.run_id, record.directory
    channel = find_supervisor(home, run_id, directory)
    if channel is None and not (directory / "stopped.json").exists():
        _refuse_unreachable(home, run_id, directory)
    run: Run[object] = Run(LocalRun(run_id, directory, record.world_size, channel), record.spec or RunSpec())
    run.session = record.session
    if channel is None:
        run._nothing_more()
    else:
        if not run._hear(SNAPSHOT_S) and record.live:
            # `attach` reads the state from the run's files, because the supervisor is busy.
            run._state = State(record.state)
        if run._refused is not None:
            raise AgentUnavailable(f"{run._refused.message}; the run continues", hint=run._refused.hint)
    return run


def find_supervisor(home: Home, run_id: str, directory: Path) -> Channel | None:
    """Wait until a run's supervisor listens, and connect to the supervisor.

    Return None if the run has ended.
    """
    path = str(home.sockets() / f"{run_id}.sock")
    deadline_ns = SystemClock().boottime_ns() + int(_APPEAR_S * 1e9)
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(path)
            return Channel(sock)
        except OSError:
            sock.close()
        if (directory / "stopped.json").exists() or SystemClock().boottime_ns() > deadline_ns:
            return None
        select.select([], [], [], _LOOK_S)


def _refuse_unreachable(home: Home, run_id: str, directory: Path) -> None:
    """Raise an error if the run's supervisor is running but unreachable."""
    status = agent_status(home.root)
    if status is not None and run_id in status.queued:
        message = f"run {run_id} is still queued behind {len(status.attempts)} other runs of this home directory"
        raise AgentUnavailable(message, hint="attach after the run has started; `sgpu status` shows the queue")
    if is_held(directory / "supervisor.lock"):
        message = f"this process cannot reach the supervisor of the running run {run_id}"
        hint = f"use the same SERVERLESS_GPU_SOCKETS and /tmp as the run; the run's outcome will be in {directory}"
        raise AgentUnavailable(message, hint=hint)
