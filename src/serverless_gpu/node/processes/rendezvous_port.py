"""A port for the gang's rendezvous that no other process can take before rank 0 listens on it.

A socket that is bound but does not listen keeps the port: the kernel gives it to no process that lets it choose, and
refuses those that do not set SO_REUSEADDR. torch's store sets it, and the kernel lets it bind and listen beside us.
Launchers usually bind and close, which leaves a gap in which another launcher gets the same port.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

_TRIES = 5


class NoPort(Exception):
    """No port could be reserved."""


def reserve_port(candidates: Iterable[int] = (0,) * _TRIES) -> socket.socket:
    """Return a bound, non-listening socket for the first free candidate (0: any); closing frees it.

    Raises NoPort, which names the candidates.
    """
    tried: list[str] = []
    for port in candidates:
        sock = _socket()
        try:
            sock.bind(("::" if sock.family == socket.AF_INET6 else "0.0.0.0", port))
        except OSError as error:
            sock.close()
            tried.append(f"{port or 'any port'} ({error.strerror})")
            continue
        return sock
    raise NoPort(f"no rendezvous port could be reserved: {', '.join(tried)}")


def _socket() -> socket.socket:
    # torch's store binds the IPv6 wildcard where it can, which covers IPv4 too: reserve the same.
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock
