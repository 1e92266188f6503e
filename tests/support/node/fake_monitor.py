"""A monitor that is not one: it hears what supervisors say, and says what a test wants.

It has the lock of a real one, so that no agent starts that beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import TypeVar

from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.monitor import messages

W = TypeVar("W", bound=messages.MonitorMessage)
Answers = Callable[[messages.AnyMonitorMessage], Iterable[messages.MonitorMessage]]


class FakeMonitor:
    """Listens where a monitor would; `heard` has every word of every peer, in order.

    Args:
        sockets: where the sockets of a home are.
        answers: what is said to a word.
    """

    def __init__(self, sockets: Path, answers: Answers = lambda _: ()) -> None:
        self.heard: list[messages.AnyMonitorMessage] = []
        self.peers: list[Channel] = []
        self.ended = 0
        self._answers = answers
        self._path = messages.monitor_socket(sockets)
        self._path.unlink(missing_ok=True)
        self._lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError):  # one that has died before has it, and keeps it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._path))
        self._listener.listen(16)

    def accept(self) -> Channel:
        """Return the next peer, once one has come."""
        self._listener.settimeout(60)
        sock, _ = self._listener.accept()
        sock.settimeout(60)
        self.peers.append(Channel(sock))
        return self.peers[-1]

    def hear(self, peer: Channel) -> messages.AnyMonitorMessage | None:
        """Take one word and answer it."""
        word = messages.receive(peer)
        if word is None:
            self.ended += 1
            return None
        if not isinstance(word, messages.Prepare):  # of an agent
            self.heard.append(word)
        for answer in self._answers(word):
            with contextlib.suppress(OSError):
                messages.send(peer, answer)
        return word

    def all(self, kind: type[W]) -> list[W]:
        """Return the words of one kind that were heard."""
        return [word for word in self.heard if isinstance(word, kind)]

    def serve(self) -> FakeMonitor:
        """Hear and answer in threads, until `close`."""
        Thread(target=self._serve, daemon=True).start()
        return self

    def close(self) -> None:
        """End, and let others be the monitor."""
        self.die()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def die(self) -> None:
        """End as a killed monitor does: everything is closed, and nobody listens; but none is started either."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.peers.append(Channel(sock))
            Thread(target=self._listen, args=(self.peers[-1],), daemon=True).start()

    def _listen(self, peer: Channel) -> None:
        with contextlib.suppress(OSError):
            while self.hear(peer) is not None:
                pass
