"""Watchers of an attempt: the client that launched it, others that attached.

    first client ──┐
    attach ────────┼──▶ Audience ──▶ one Watcher each
    a new agent ───┘    (listens on <sockets>/<run>.sock)

A watcher that does not read loses output only: messages queue up to a bound (`outbox.py`), output is left out first,
everything else is kept, there is little of it. A watcher that goes away is forgotten; the run goes on. One too many is
refused with a sentence.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.node.base import protocol
from serverless_gpu.node.inside.channel import Channel, close_all
from serverless_gpu.node.output.outbox import Outbox

WATCHERS_MAX = 64
_FULL_HINT = "try again when one of them has gone"
_BREATH_S = 0.05
_LAST_WORDS_S = 5.0


class Watcher:
    """One connection and what still has to be sent on it."""

    def __init__(self, channel: Channel) -> None:
        channel.sock.setblocking(False)
        self.channel = channel
        self.gone = False
        self._deaf = False
        self._outbox = Outbox()

    @property
    def waiting(self) -> bool:
        """Return whether something is queued for when the peer reads again."""
        return len(self._outbox) > 0

    @property
    def dropped_bytes(self) -> int:
        """Return how much output was left out because the peer did not read."""
        return self._outbox.dropped_bytes

    def say(self, message: protocol.Sendable) -> None:
        """Send a message, or queue it."""
        if not self._deaf:
            self._outbox.say(message)
            self.flush()

    def show(self, message: protocol.Output, size: int, lost: bool) -> None:
        """Send output, queue it, or leave it out; `lost` means that it is not in the rank's file."""
        if not self._deaf:
            self._outbox.show(message, size, lost)
            self.flush()

    def skip(self, rank: int, stream: str, size: int, lost: bool) -> None:
        """Say that output is missing here, now or later."""
        if not self._deaf:
            self._outbox.skip(rank, stream, size, lost)
            self.flush()

    def flush(self) -> None:
        """Send what the peer will take."""
        while not self.gone and (message := self._outbox.first()) is not None:
            try:
                protocol.send(self.channel, message)
            except BlockingIOError:
                return
            except OSError:
                # It does not listen any more; its last word, a cancel perhaps, may still be there to read.
                self._deaf = True
                self._outbox.clear()
                return
            self._outbox.sent()

    def drain(self, timeout_s: float) -> None:
        """Send what is queued, waiting for the peer up to a limit for each message."""
        self.channel.sock.settimeout(timeout_s)
        self.flush()

    def hear(self, obey: Callable[[protocol.AnyMessage], None]) -> bool:
        """Take one message and pass it on; return False when the peer is gone or talks nonsense."""
        try:
            received = protocol.receive(self.channel)
        except BlockingIOError:
            return True
        except (OSError, msgspec.MsgspecError):
            return False
        if received is None:
            return False
        close_all(received[1])  # a supervisor takes no descriptors
        obey(received[0])
        return True


class Audience:
    """All watchers of one attempt, and the socket on which more of them connect.

    `greet` returns the first messages for those that connect; `obey` gets each message and its watcher.
    """

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        greet: Callable[[], protocol.Sendable],
        obey: Callable[[protocol.AnyMessage, Watcher], None],
    ) -> None:
        self._path = path
        self._selector = selector
        self._greet = greet
        self._obey = obey
        self._watchers: list[Watcher] = []
        self._listener: socket.socket | None = None

    @property
    def waiting(self) -> bool:
        """Return whether something is queued for a watcher that does not read."""
        return any(watcher.waiting for watcher in self._watchers)

    @property
    def watching(self) -> bool:
        """Return whether anybody watches."""
        return bool(self._watchers)

    @property
    def dropped_bytes(self) -> int:
        """Return how much output was not shown to watchers that did not read."""
        return sum(watcher.dropped_bytes for watcher in self._watchers)

    def listen(self) -> str:
        """Let others attach; return why that is not possible, or ""."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(str(self._path))
            sock.listen(128)
        except OSError as error:
            sock.close()
            return f"attach is not possible: {self._path}: {error.strerror}"
        self._listener = sock
        self._selector.register(sock, selectors.EVENT_READ, self._accept)
        return ""

    def add(self, channel: Channel) -> Watcher:
        """Let a connection watch."""
        watcher = Watcher(channel)
        self._watchers.append(watcher)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(watcher))
        return watcher

    def tell(self, message: protocol.Sendable) -> None:
        """Say something to every watcher."""
        for watcher in self._watchers:
            watcher.say(message)

    def output(self, rank: int, stream: str, text: str, *, size: int, lost: bool) -> None:
        """Show every watcher what a rank wrote."""
        message = protocol.Output(rank=rank, stream=stream, text=text)
        for watcher in self._watchers:
            watcher.show(message, size, lost)

    def skipped(self, rank: int, stream: str, size: int, *, lost: bool) -> None:
        """Tell every watcher how much is missing at this point."""
        for watcher in self._watchers:
            watcher.skip(rank, stream, size, lost)

    def tend(self) -> None:
        """Forget watchers that are gone, send the others what they will take now."""
        for watcher in [watcher for watcher in self._watchers if watcher.gone]:
            self._watchers.remove(watcher)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(watcher.channel)
            watcher.channel.close()
        for watcher in self._watchers:
            watcher.flush()

    def drain(self) -> None:
        """Send everything that is queued, waiting for slow readers a while."""
        for watcher in self._watchers:
            watcher.drain(_LAST_WORDS_S)

    def close(self) -> None:
        """Refuse further watchers."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            select.select([], [], [], _BREATH_S)  # no descriptors: a pending connection would wake it at once
            return
        channel = Channel(sock)
        if len(self._watchers) < WATCHERS_MAX:
            self.add(channel).say(self._greet())
            return
        message = f"{WATCHERS_MAX} others are connected to {self._path.stem}, and more it does not take"
        with contextlib.suppress(OSError):
            protocol.send(channel, protocol.Refused(code=AgentUnavailable.code, message=message, hint=_FULL_HINT))
        channel.close()

    def _hear(self, watcher: Watcher) -> None:
        if not watcher.hear(lambda message: self._obey(message, watcher)):
            watcher.gone = True
