"""One home for all snippets: a reader has one, and its warm interpreters make the second script fast."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.testing import stop_agent
from tests.support.remote.server_process import ServerProcess


@pytest.fixture(scope="session")
def reader() -> Iterator[dict[str, str]]:
    """Yield the environment of a reader: his own home, nothing set, at least 2 CPU slots."""
    directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SERVERLESS_GPU_", "SGPU_"))}
    environ["SERVERLESS_GPU_HOME"] = str(directory)
    if len(os.sched_getaffinity(0)) < 2:
        environ["SERVERLESS_GPU_FAKE"] = "CPU:2"
    try:
        yield environ
    finally:
        stop_agent(directory)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def server(reader: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield the environment of a reader in whose home a server runs; its node has the fake GPUs of `team-server.md`."""
    process = ServerProcess(Path(reader["SERVERLESS_GPU_HOME"]))
    cpus = reader.get("SERVERLESS_GPU_FAKE")
    process.start(environ={"SERVERLESS_GPU_FAKE": ",".join(filter(None, ["H100:4", cpus]))})
    try:
        yield reader
    finally:
        process.kill(signal.SIGTERM)
