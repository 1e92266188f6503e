"""A server without a node of its own; tests bring the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.ambient import machine
from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.client.remote.server import close_all
from serverless_gpu.testing import stop_agent
from tests.support.local.observe import processes_of, wait_for
from tests.support.server.served import served


@pytest.fixture
def lone_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the home of a server whose machine is no node of it."""
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:2")
    with served(home) as server:
        write_profile(home, ServerProfile(url=server.url, token=server.token, embedded=True, machine=machine()))
        yield home
        close_all()
    stop_agent(home)
    wait_for(lambda: not processes_of(home), "no process of the server's home is left")
