"""Rounds of submissions: threads of a client ask a served server for runs, which wait, as it has no node."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from benchmarks.contestants import ContestantFailed
from benchmarks.databases import held, new_postgresql
from serverless_gpu.ambient import new_run_id
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import RunRequest, RunView, Target

SUBMISSIONS = 256
THREADS = 16
_CONTEXT = msgspec.Raw(msgspec.json.encode({"environ": {f"VARIABLE_{number}": "x" * 60 for number in range(50)}}))


def sqlite(directory: str) -> dict[str, object]:
    """On the database that `sgpu up` has without options."""
    return _timed(_server("sqlite"))


def postgresql(directory: str) -> dict[str, object]:
    """On a PostgreSQL that waits for its disk."""
    return _timed(_server("postgresql"))


def _timed(connection: Connection) -> dict[str, object]:
    requests = [_request() for _ in range(SUBMISSIONS)]

    def submit(request: RunRequest) -> float:
        began_ns = time.perf_counter_ns()
        connection.ask("POST", "/runs", request, answer=RunView)
        return (time.perf_counter_ns() - began_ns) / 1e6

    with ThreadPoolExecutor(THREADS) as threads:
        began_ns = time.perf_counter_ns()
        each = list(threads.map(submit, requests))
        return {"ms": (time.perf_counter_ns() - began_ns) / 1e6, "one_ms": statistics.median(each)}


def _request() -> RunRequest:
    target = Target(machine="m", python="3.11", platform="linux-x86_64")
    spec = RunSpec(remote=True, environment="live")
    return RunRequest(id=new_run_id(), spec=spec, target=target, context=_CONTEXT, call=b"x" * 1000)


@functools.cache
def _server(kind: str) -> Connection:
    """Start a server of its own; it ends with the contestant's session."""
    home = Path(os.environ["SERVERLESS_GPU_HOME"]) / kind
    home.mkdir()
    command = [sys.executable, "-m", "serverless_gpu.cli", "up", "--no-node", "--port", "0"]
    if kind == "postgresql":
        command += ["--database", new_postgresql()]
    environ = {**os.environ, "SERVERLESS_GPU_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    process = held.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True))
    held.callback(process.terminate)
    assert process.stdout is not None
    url = process.stdout.readline().rpartition(" ")[2].strip()
    if not url.startswith("http"):
        raise ContestantFailed("the server did not start")
    token = (home / "server" / "token").read_text(encoding="ascii").strip()
    return held.enter_context(contextlib.closing(Connection(url, token)))
