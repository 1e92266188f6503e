"""Attempts on network services of the node, of the server, of other nodes and of other runs.

A target is a list of addresses, separated by commas, such as ``10.0.0.2:22,[fd00::2]:22``. An attempt succeeds if it
can connect to one of them.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import select
import socket
import ssl
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from .base import Attempt, Targets

_CONNECT_S = 2.0
_METADATA = (
    "169.254.169.254:80,169.254.170.2:80,100.100.100.200:80,168.63.129.16:80,192.0.0.192:80,"
    "[fd00:ec2::254]:80,[fd20:ce::254]:80"
)
"""Metadata services of AWS, Azure, Google, OpenStack and others, of containers on AWS, and of Alibaba and Oracle."""


def _connect(target: str) -> Attempt:
    return lambda targets: connect_to_any(targets.text(target))


def connect_to_any(places: str) -> None:
    """Connect to one of several addresses. Raises the OSError of the last address that answers."""
    last: OSError = TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    waiting: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        for place in places.split(","):
            host, _, port = place.rpartition(":")
            try:
                found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
                peer = stack.enter_context(socket.socket(found[0], socket.SOCK_STREAM))
                peer.setblocking(False)
                code = peer.connect_ex(found[4])
            except OSError as error:
                last = error
                continue
            if code == 0:
                return
            if code != errno.EINPROGRESS:
                last = OSError(code, os.strerror(code))
                continue
            poll.register(peer, select.POLLOUT)
            waiting[peer.fileno()] = peer
        until = time.monotonic() + _CONNECT_S
        while waiting and (left_s := until - time.monotonic()) > 0:
            for fd, _event in poll.poll(left_s * 1000):
                poll.unregister(fd)
                code = waiting.pop(fd).getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    return
                last = OSError(code, os.strerror(code))
    raise last


def _replay(targets: Targets) -> None:
    """Send a request to the server with the token of the node, which the node's profile may contain."""
    with open(targets.text("node_token"), encoding="utf-8", errors="replace") as file:
        text = file.read().strip()
    profile = json.loads(text) if text.startswith("{") else {"token": text}
    url = urlsplit(targets.text("server_url"))
    if url.scheme == "https":
        trusted = ssl.create_default_context(cafile=profile.get("ca") or None)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            url.hostname or "", url.port, timeout=_CONNECT_S, context=trusted
        )
    else:
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=_CONNECT_S)
    try:
        connection.request("GET", "/api/v1/whoami", headers={"Authorization": f"Bearer {profile['token']}"})
        status = connection.getresponse().status
    finally:
        connection.close()
    if status != http.HTTPStatus.OK:
        raise OSError(errno.EACCES, f"the server answered {int(status)}")


ATTEMPTS: Mapping[str, Attempt] = {
    "server-port": _connect("server_port"),
    "database-port": _connect("database_port"),
    "ray-port": _connect("ray_port"),
    "other-ray-port": _connect("other_ray_port"),
    "other-node-port": _connect("other_node_port"),
    "node-port": _connect("node_port"),
    "other-run-port": _connect("victim_port"),
    "metadata-address": lambda _: connect_to_any(_METADATA),
    "replay-node-token": _replay,
}
