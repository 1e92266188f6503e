"""The process of the environment service (`environment/service.py`), one per calling process.

The process has a clean interpreter and ends with its caller.
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
    """Serve one caller over the inherited channel until the caller exits."""
    if os.fork():
        os._exit(0)  # init adopts the service, so that a long-running caller does not keep a zombie.
    linux.set_name("sgpu-snapshots")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    process = -1
    with contextlib.suppress(OSError):  # If the caller has already exited, the service detects the closed socket.
        process = os.pidfd_open(caller)
    Service(_Wire(channel), Path(index)).serve(process)
    os._exit(0)
