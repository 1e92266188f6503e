"""Whoever watches an attempt: the client that launched it, others that attached.

    first client ──┐
    attach ────────┼──▶ Audience ──▶ one Watcher each
    a new agent ───┘    (listens on <sockets>/<run>.sock)

A watcher that does not read costs nothing but its own output: messages queue up to a bound, output is dropped first,
everything else is kept (there are few of those). What was dropped is counted and said once the watcher has read half of
its queue, or before the next thing that is no output. A watcher that goes away is forgotten; the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from serverless_gpu.node import protocol
from serverless_gpu.node.inside.channel import Channel

_QUEUED_MAX = 8_192
_QUEUED_CHARACTERS_MAX = 4 << 20  # a pager, a stopped terminal, a slow line: minutes of an ordinary program
_MERGED_CHARACTERS_MAX = 8 << 10  # as JSON it still fits into one packet
_WATCHERS_MAX = 64
_LAST_WORDS_S = 5.0


class Watcher:
    """One connection and what still has to be sent on it."""

    def __init__(self, channel: Channel) -> None:
        channel.sock.setblocking(False)
        self.channel = channel
        self.dropped_bytes = 0
        self.gone = False
        self._deaf = False
        self._choked = False
        self._missing: Counter[tuple[int, str, bool]] = Counter()  # bytes not said yet, by rank, stream, lost
        self._queue: deque[protocol.Message] = deque()
        self._characters = 0  # of output in the queue

    @property
    def waiting(self) -> bool:
        """Return whether something is queued for when the peer reads again."""
        return bool(self._queue)

    def say(self, message: protocol.Message) -> None:
        """Send a message, or queue it."""
        if self._deaf or (isinstance(message, protocol.Waiting) and len(self._queue) >= _QUEUED_MAX):
            return
        self._own_up()
        self._queue.append(message)
        self.flush()

    def show(self, message: protocol.Output, size: int, lost: bool) -> None:
        """Send output, queue it, or leave it out.

        Args:
            message: the text.
            size: its size in bytes.
            lost: whether it is not in the rank's file.
        """
        if self._room():
            self._characters += len(message.text)
            self._queue.append(self._merged(message))
            self.flush()
        elif not self._deaf:
            self.dropped_bytes += size
            self._missing[message.rank, message.stream, lost] += size

    def skip(self, rank: int, stream: str, size: int, lost: bool) -> None:
        """Say that output is missing here, now or later."""
        self._missing[rank, stream, lost] += size
        if self._room():
            self._own_up()
            self.flush()

    def _merged(self, message: protocol.Output) -> protocol.Output:
        """Return output together with what is last in the queue, which it takes from there, if it goes on from that."""
        last = self._queue[-1] if self._queue else None
        if not isinstance(last, protocol.Output) or (last.rank, last.stream) != (message.rank, message.stream):
            return message
        if len(last.text) + len(message.text) > _MERGED_CHARACTERS_MAX:
            return message
        self._queue.pop()
        return msgspec.structs.replace(message, text=last.text + message.text)

    def _room(self) -> bool:
        full = len(self._queue) >= _QUEUED_MAX or self._characters >= _QUEUED_CHARACTERS_MAX
        self._choked = self._choked or full
        return not (self._choked or self._deaf)

    def _own_up(self) -> None:
        for (rank, stream, lost), size in self._missing.items():
            self._queue.append(protocol.Skipped(rank=rank, stream=stream, bytes=size, lost=lost))
        self._missing.clear()

    def flush(self) -> None:
        """Send what the peer will take."""
        while self._queue and not self.gone:
            half_empty = len(self._queue) <= _QUEUED_MAX // 2 and self._characters <= _QUEUED_CHARACTERS_MAX // 2
            if self._choked and half_empty:
                self._choked = False
                self._own_up()
            try:
                protocol.send(self.channel, self._queue[0])
            except BlockingIOError:
                return
            except OSError:
                # It does not listen any more; its last word, a cancel perhaps, may still be there to read.
                self._deaf = True
                self._queue.clear()
                self._missing.clear()
                return
            sent = self._queue.popleft()
            self._characters -= len(sent.text) if isinstance(sent, protocol.Output) else 0

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
        obey(received[0])
        return True


class Audience:
    """All watchers of one attempt, and the socket on which more of them come.

    Args:
        path: where to listen.
        selector: the supervisor's; what watchers say is heard there.
        greet: returns the first words for whoever comes by the socket.
        obey: called with what a watcher says, and the watcher.
    """

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        greet: Callable[[], protocol.Message],
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

    def tell(self, message: protocol.Message) -> None:
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
        """Let nobody attach any more."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._watchers) >= _WATCHERS_MAX:
                sock.close()
                return
            self.add(Channel(sock)).say(self._greet())

    def _hear(self, watcher: Watcher) -> None:
        if not watcher.hear(lambda message: self._obey(message, watcher)):
            watcher.gone = True
