"""A home whose node belongs to a server of the test's own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.start_stop import ensure, stop_all
from serverless_gpu.testing import stop_agent
from tests.support.local.observe import cancel_all, processes_of, wait_for
from tests.support.node.agent_server import AgentServer
from tests.support.node.node import Node


@pytest.fixture
def where(tmp_path: Path) -> str:
    """Return a directory in which ranks announce themselves and look for what they wait for."""
    return str(tmp_path)


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentServer]:
    """Yield a server that nobody has joined; nothing of a node is left afterwards."""
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:8")
    with AgentServer(home) as server:
        try:
            yield server
        finally:
            cancel_all(home)
            stop_all(Home(home))
            wait_for(lambda: not any("uplink" in line for line in processes_of(home)), "the uplink is gone")


@pytest.fixture
def node(server: AgentServer) -> Node:
    """Return a node that has joined the server."""
    ensure(Home(server.home), server.profile, os.environ)
    return Node(server)


@pytest.fixture
def nodes(node: Node) -> Iterator[list[Node]]:
    """Yield two nodes of one server, each with a home of its own on this machine."""
    wait_for(lambda: len(node.server.nodes) == 1, "the first has joined")
    directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    other = Node(node.server, directory)
    other.profile.parent.mkdir(mode=0o700)
    node.server.write_profile(other.profile, name="another")
    try:
        ensure(other.home, other.profile, os.environ)
        wait_for(lambda: len(node.server.nodes) == 2, "the second has joined")
        yield [node, other]
    finally:
        stop_all(other.home)
        cancel_all(directory)
        stop_agent(directory)
        wait_for(lambda: not any("uplink" in line for line in processes_of(directory)), "its uplink is gone")
        shutil.rmtree(directory, ignore_errors=True)
