"""A monitor that shows what a test says, as a server on the socket of a home."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.monitor import messages

_FRAME_S = 0.05


class FramingMonitor:
    """Listens until the end of a `with` block and sends frame after frame to whoever asks to watch.

    Args:
        home: of which it is the monitor.
        frame: returns the frame with this number.

    Attributes:
        watches: what was asked for.
    """

    def __init__(self, home: Path, frame: Callable[[int], messages.NodeFrame]) -> None:
        self._path = messages.monitor_socket(Home(home).sockets())
        self._frame = frame
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.watches: list[messages.WatchNode] = []

    def __enter__(self) -> FramingMonitor:
        self._path.unlink(missing_ok=True)
        self._listener.bind(str(self._path))
        self._listener.listen(8)
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._path.unlink(missing_ok=True)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            if select.select([self._listener], [], [], _FRAME_S)[0]:
                channel = Channel(self._listener.accept()[0])
                self._start(lambda channel=channel: self._serve(channel))  # type: ignore[misc]  # bound now

    def _serve(self, channel: Channel) -> None:
        with contextlib.closing(channel), contextlib.suppress(OSError):
            if not select.select([channel], [], [], 10)[0]:
                return
            word = messages.receive(channel)
            if not isinstance(word, messages.WatchNode):
                return
            self.watches.append(word)
            number = 0
            while not self._over.wait(_FRAME_S):
                messages.send(channel, self._frame(number))
                number += 1
