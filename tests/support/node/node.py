"""What tests do with a node: give it calls, look at its files, kill its uplink."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from serverless_gpu.client.caller_context import caller_context
from serverless_gpu.client.launch.preflight import pack
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.attempt.server_attempt_record import read_remote
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.start_stop import ensure, running
from tests.support.local.observe import Process, wait_for
from tests.support.node.agent_server import AgentServer, SeenAttempt

__all__ = ["Node"]


class Node:
    """The node of a test.

    Args:
        server: the server it has joined.
        home: its home, where that is not the server's.
    """

    def __init__(self, server: AgentServer, home: Path | None = None) -> None:
        self.server = server
        self.home = Home(home or server.home)
        self.profile = server.profile if home is None else home / "server" / "uplink.json"

    def run(self, function: Callable[..., object], *args: object, ranks: int = 1, **changes: Any) -> SeenAttempt:
        """Order a call of a function in so many ranks."""
        spec = RunSpec(name=getattr(function, "__name__", "call"), remote=True, **changes.pop("spec", {}))
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "call.pkl")
            pack(str(path), function, args, {})
            call = path.read_bytes()
        context = msgspec.json.encode(caller_context())
        return self.server.order(spec, call, context, world_size=ranks, **changes)

    def directory(self, attempt: SeenAttempt) -> Path:
        """Return the attempt's directory."""
        return self.home.attempt(attempt.start.run_id, attempt.start.fence)

    def standing(self, attempt: SeenAttempt) -> str:
        """Return what the directory says of the server."""
        remote = read_remote(self.directory(attempt))
        return "" if remote is None else remote.standing

    def uplink(self) -> Process:
        """Return the uplink."""
        found = wait_for(lambda: running(self.home, self.profile), "an uplink runs")
        assert found is not None
        return Process(found.pid)

    def restart(self) -> None:
        """Start the uplink that was killed, as an engine does."""
        assert ensure(self.home, self.profile, os.environ)

    def log(self) -> str:
        """Return what the uplink wrote."""
        return (self.home.root / "uplink.log").read_text()
