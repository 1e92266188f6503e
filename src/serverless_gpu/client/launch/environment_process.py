"""Runs the environment service (`environment/service.py`) in one process per client process.

The environment service runs in a new Python interpreter and exits together with the client process.
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
    """Serve a client process over the inherited socket until the client exits."""
    if os.fork():
        # The environment service becomes a child of init, so that a long-running client has no zombie process.
        os._exit(0)
    linux.set_name("sgpu-snapshots")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    process = -1
    with contextlib.suppress(OSError):  # If the client has exited, the service detects the closed socket.
        process = os.pidfd_open(caller)
    Service(_Wire(channel), Path(index)).serve(process)
    os._exit(0)
