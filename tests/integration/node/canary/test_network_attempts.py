"""Attempts on several addresses at once, and the replay of a node's token."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from serverless_gpu.node.inside.canary.base import Targets
from serverless_gpu.node.inside.canary.network import ATTEMPTS, connect_to_any


@pytest.fixture
def closed() -> Iterator[str]:
    """Yield an address that refuses connections: its port is bound, and nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def server() -> Iterator[str]:
    """Yield the URL of a server that accepts one token."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/api/v1/whoami":
                self.send_error(404)
            elif self.headers["Authorization"] != "Bearer right":
                self.send_error(401)
            else:
                self.send_response(200)
                self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_one_open_address_of_several_is_enough(closed: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        opened = f"127.0.0.1:{listener.getsockname()[1]}"
        for places in (opened, f"{closed},{opened}", f"{opened},{closed}", f"[::1%none]:1,{opened}"):
            connect_to_any(places)


def test_closed_addresses_refuse(closed: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        connect_to_any(f"{closed},{closed}")


@pytest.mark.parametrize("text", ["right\n", json.dumps({"token": "right", "ca": ""})])
def test_a_token_that_the_server_accepts_is_a_success(server: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    ATTEMPTS["replay-node-token"](Targets({"node_token": str(tmp_path / "token"), "server_url": server}))


def test_a_token_that_the_server_refuses_is_a_refusal(server: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong")
    with pytest.raises(PermissionError, match="401"):
        ATTEMPTS["replay-node-token"](Targets({"node_token": str(tmp_path / "token"), "server_url": server}))
