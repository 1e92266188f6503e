"""A home whose node belongs to a server of the test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.home import Home
from serverless_gpu.node.uplink.control import ensure, stop_all
from tests.local.observe import cancel_all, processes_of, wait_for
from tests.uplink.agent_server import AgentServer
from tests.uplink.node import Node


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentServer]:
    """Yield a server that nobody has joined."""
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:8")
    with AgentServer(home) as server:
        yield server


@pytest.fixture
def node(server: AgentServer) -> Iterator[Node]:
    """Yield a node that has joined the server; nothing of it is left afterwards."""
    home = Home(server.home)
    ensure(home, server.profile, os.environ)
    try:
        yield Node(server)
    finally:
        cancel_all(server.home)
        stop_all(home)
        wait_for(lambda: not any("uplink" in line for line in processes_of(server.home)), "the uplink is gone")
