"""Ports for servers that are ended and started again at the same address."""

from __future__ import annotations

import contextlib
import os
import socket

# Parts of the tests that run at once have neighbouring process numbers, and must not have neighbouring ports.
_ports = iter(range(10_000 + os.getpid() * 1_009 % 20_000, 32_000))


def own_port() -> int:
    """Return a port that nobody gets by chance while the server that has it is being started again.

    It is below those that the kernel gives to whoever asks for any.
    """
    for port in _ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("no port is free")
