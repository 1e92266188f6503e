"""Notifies systemd of the server's state.

If systemd does not answer, the server continues without notifications. `systemd_units.py` generates the units.
"""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"
TAKEN_OVER = 3
"""Exit status of a server that another server has replaced, so that systemd does not restart it."""


def notify(place: str, *lines: str) -> None:
    """Send lines to systemd's notification socket at `place`, the value of `NOTIFY_SOCKET`.

    If `place` is "", the function does nothing.
    """
    if not place:
        return
    address = f"\0{place[1:]}" if place.startswith("@") else place
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        to.sendto("\n".join(lines).encode(), address)


def taken_from(environ: os._Environ[str]) -> str:
    """Remove `NOTIFY_SOCKET` from the environment so that child processes lack it, and return its value."""
    return environ.pop(VARIABLE, "")
