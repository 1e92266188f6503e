"""Runs the environment service (`environment/service.py`) in its own process, one per client process.

The service uses a new Python interpreter and exits when the client process exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn

from serverless_gpu.environment.service import Service
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.channel import Channel


class _Wire:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, data: bytes) -> None:
        self._channel.send(data)

    def receive(self) -> bytes | None:
        received = self._channel.receive()
        return None if received is None else received[0]


def main(channel_fd: int, caller: int, index: str) -> NoReturn:
    """Serve one client process over the inherited socket until the client exits."""
    if os.fork():
        # The kernel makes init the parent of the service, so that a long-running client keeps no zombie process.
        os._exit(0)
    linux.set_name("sgpu-snapshots")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    process = -1
    with contextlib.suppress(OSError):  # If the client has already exited, the service detects the closed socket.
        process = os.pidfd_open(caller)
    Service(_Wire(channel), Path(index)).serve(process)
    os._exit(0)
