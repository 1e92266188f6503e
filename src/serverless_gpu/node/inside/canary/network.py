"""Attempts on network services of the node, of the server and of other runs."""

from __future__ import annotations

import errno
import http.client
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from .base import Attempt, Targets

_CONNECT_S = 2.0
_METADATA = ("169.254.169.254", 80)


def _connect(target: str) -> Attempt:
    """Connect to ``HOST:PORT``."""

    def attempt(targets: Targets) -> None:
        host, _, port = targets.text(target).rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()

    return attempt


def _metadata(_: Targets) -> None:
    socket.create_connection(_METADATA, _CONNECT_S).close()


def _replay(targets: Targets) -> None:
    """Ask the server for the node's Ray credentials, with the token of the node."""
    with open(targets.text("node_token"), encoding="ascii", errors="replace") as file:
        token = file.read().strip()
    url = urlsplit(targets.text("server_url"))
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=_CONNECT_S)
    try:
        connection.request("GET", "/agents/ray", headers={"Authorization": f"Bearer {token}"})
        status = connection.getresponse().status
    finally:
        connection.close()
    if status in (401, 403):
        raise OSError(errno.EACCES, f"the server answered {status}")


ATTEMPTS: Mapping[str, Attempt] = {
    "server-port": _connect("server_port"),
    "database-port": _connect("database_port"),
    "ray-port": _connect("ray_port"),
    "node-port": _connect("node_port"),
    "other-run-port": _connect("victim_port"),
    "metadata-address": _metadata,
    "replay-node-token": _replay,
}
