"""Manages an attempt's attached clients and each client's outgoing queue.

    first client ──┐
    attach ────────┼──▶ Watchers ──▶ one Watcher each ──▶ its Outbox
    a new agent ───┘    (listens on <sockets>/<run>.sock)

A client that does not read misses output but no other messages. The supervisor omits output above the size limit of a
client's queue. The queue keeps all messages other than output, because only output is voluminous. When a client
disconnects, the supervisor removes the client without affecting the run. If too many clients are attached, the
supervisor rejects a new client with a message.

    put  ──────────────────────────▶ ┌───────────────────────────────┐
    show ──▶ below the share?  yes ─▶ │ Started · rank 0 · rank 1 · … │ ──▶ first, sent
                        │             └───────────────────────────────┘
                        └─ no: counted, and its last lines kept ──▶ queued once half of the rank's share was read, or
                                                                   before the next message that is not output

All ranks have equal shares of a client's outbox. A flood of output from one rank displaces only output of the same
rank. The outbox merges adjacent pieces of one stream into one message. Merging may slightly reorder output of different
ranks, but never output of one rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import stat
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.node.base import protocol
from serverless_gpu.node.inside.channel import Channel, close_all

WATCHERS_MAX = 64
QUEUED_CHARACTERS_MAX = 16 << 20
# Limit in characters for a slow client, such as a stopped terminal; enough for minutes of ordinary output.
RANK_CHARACTERS_MAX = 4 << 20
WAITING_MAX = 8_192  # Number of queued messages above which the outbox drops new waiting reasons.
_MERGED_CHARACTERS_MAX = 8 << 10  # A message of this size, encoded as JSON, still fits into one packet.
_MESSAGE_CHARACTERS = 512  # Assumed size in characters of a message without its text.
_END_CHARACTERS = 4 << 10
_FULL_HINT = "try again after a client has detached"
_BREATH_S = 0.05
_LAST_WORDS_S = 5.0


class Watchers:
    """All attached clients of one attempt, with the socket to which clients connect.

    `greet` returns the first message for a new client. `obey` handles each message together with its client. `connect`
    passes the socket of an `OpenEndpoint` message on, or is None where no attempt runs.
    """

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        greet: Callable[[], protocol.Sendable],
        obey: Callable[[protocol.AnyMessage, Watcher], None],
        connect: Callable[[protocol.OpenEndpoint, int], None] | None = None,
    ) -> None:
        self._connect = connect
        self._path = path
        self._selector = selector
        self._greet = greet
        self._obey = obey
        self._watchers: list[Watcher] = []
        self._listener: socket.socket | None = None

    @property
    def waiting(self) -> bool:
        """Return True if messages are queued for a client that does not read."""
        return any(watcher.waiting for watcher in self._watchers)

    @property
    def watching(self) -> bool:
        """Return True while a client is attached."""
        return bool(self._watchers)

    @property
    def dropped_bytes(self) -> int:
        """Return the number of output bytes that slow clients did not receive."""
        return sum(watcher.dropped_bytes for watcher in self._watchers)

    def listen(self) -> str:
        """Accept further clients. Return the reason if the socket cannot be opened, or ""."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(str(self._path))
            sock.listen(128)
        except OSError as error:
            sock.close()
            return f"clients cannot attach: {self._path}: {error.strerror}"
        self._listener = sock
        self._selector.register(sock, selectors.EVENT_READ, self._accept)
        return ""

    def add(self, channel: Channel) -> Watcher:
        """Add a client connection."""
        watcher = Watcher(channel)
        self._watchers.append(watcher)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(watcher))
        return watcher

    def tell(self, message: protocol.Sendable) -> None:
        """Send a message to every attached client."""
        for watcher in self._watchers:
            watcher.send(message)

    def output(self, rank: int, stream: str, text: str, *, size: int, lost: bool) -> None:
        """Send a rank's output to every attached client."""
        message = protocol.Output(rank=rank, stream=stream, text=text)
        for watcher in self._watchers:
            watcher.show(message, size, lost)

    def skipped(self, rank: int, stream: str, size: int, *, lost: bool) -> None:
        """Report a gap in the output to every attached client."""
        for watcher in self._watchers:
            watcher.skip(rank, stream, size, lost)

    def tend(self) -> None:
        """Remove disconnected clients, and send queued messages to connected clients."""
        for watcher in [watcher for watcher in self._watchers if watcher.gone]:
            self._watchers.remove(watcher)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(watcher.channel)
            watcher.channel.close()
        for watcher in self._watchers:
            watcher.flush()

    def drain(self) -> None:
        """Send all queued messages, with a time limit for slow clients."""
        for watcher in self._watchers:
            watcher.drain(_LAST_WORDS_S)

    def close(self) -> None:
        """Stop accepting clients."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # Without free descriptors, accept would fail at once in a busy loop.
            select.select([], [], [], _BREATH_S)
            return
        channel = Channel(sock)
        if len(self._watchers) < WATCHERS_MAX:
            self.add(channel).send(self._greet())
            return
        message = f"run {self._path.stem} already has {WATCHERS_MAX} attached clients, its maximum"
        with contextlib.suppress(OSError):
            protocol.send(channel, protocol.Refused(code=AgentUnavailable.code, message=message, hint=_FULL_HINT))
        channel.close()

    def _hear(self, watcher: Watcher) -> None:
        if not watcher.receive(lambda message, fds: self._take(message, fds, watcher)):
            watcher.gone = True

    def _take(self, message: protocol.AnyMessage, fds: tuple[int, ...], watcher: Watcher) -> None:
        if not isinstance(message, protocol.OpenEndpoint):
            self._obey(message, watcher)
        elif self._connect is not None and len(fds) == 1 and stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
            self._connect(message, fds[0])


class Watcher:
    """One attached client with its queue of unsent messages."""

    def __init__(self, channel: Channel) -> None:
        channel.sock.setblocking(False)
        self.channel = channel
        self.gone = False
        self._deaf = False
        self._outbox = Outbox()

    @property
    def waiting(self) -> bool:
        """Return True if messages are queued until the client reads again."""
        return len(self._outbox) > 0

    @property
    def dropped_bytes(self) -> int:
        """Return the number of output bytes that this client missed by not reading."""
        return self._outbox.dropped_bytes

    def send(self, message: protocol.Sendable) -> None:
        """Send a message to the client, or queue the message."""
        if not self._deaf:
            self._outbox.put(message)
            self.flush()

    def show(self, message: protocol.Output, size: int, lost: bool) -> None:
        """Send, queue or omit output.

        `lost` is True if the output is missing from the rank's log file.
        """
        if not self._deaf:
            self._outbox.show(message, size, lost)
            self.flush()

    def skip(self, rank: int, stream: str, size: int, lost: bool) -> None:
        """Report a gap at the current position of the output."""
        if not self._deaf:
            self._outbox.skip(rank, stream, size, lost)
            self.flush()

    def flush(self) -> None:
        """Send queued messages until the client stops reading."""
        while not self.gone and (message := self._outbox.first()) is not None:
            try:
                protocol.send(self.channel, message)
            except BlockingIOError:
                return
            except OSError:
                # The client has stopped reading or closed its socket. The client's last message, such as a cancel
                # request, may still be in the receive buffer.
                self._deaf = True
                self._outbox.clear()
                return
            self._outbox.sent()

    def drain(self, timeout_s: float) -> None:
        """Send queued messages with a time limit for each message."""
        self.channel.sock.settimeout(timeout_s)
        self.flush()

    def receive(self, obey: Callable[[protocol.AnyMessage, tuple[int, ...]], None]) -> bool:
        """Read and handle one message, and close its descriptors.

        Return False at end of file or after an invalid message.
        """
        try:
            received = protocol.receive(self.channel)
        except BlockingIOError:
            return True
        except (OSError, msgspec.MsgspecError):
            return False
        if received is None:
            return False
        try:
            obey(*received)
        finally:
            close_all(received[1])
        return True


class Outbox:
    """The outgoing queue of one client, which may read more slowly than ranks write. Does no I/O."""

    def __init__(self) -> None:
        self.dropped_bytes = 0  # Number of output bytes that the outbox dropped permanently.
        self._queue: deque[protocol.Sendable | _Piece] = deque()
        self._growing: dict[int, _Piece] = {}  # rank → last piece, if more text may be appended to the piece
        self._used: Counter[int] = Counter()  # rank → queued characters
        self._full: set[int] = set()
        self._gaps: dict[tuple[int, str], _Gap] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def clear(self) -> None:
        """Remove all messages."""
        self._queue.clear()
        self._growing.clear()
        self._used.clear()
        self._full.clear()
        self._gaps.clear()

    def put(self, message: protocol.Sendable) -> None:
        """Queue a message that is not output, after all earlier gap notices."""
        if isinstance(message, protocol.WaitingNote) and len(self._queue) >= WAITING_MAX:
            return
        for rank in dict.fromkeys(rank for rank, _ in self._gaps):
            self._own_up(rank)
        self._growing.clear()
        self._queue.append(message)

    def show(self, message: protocol.Output, size: int, lost: bool) -> None:
        """Queue `size` bytes of output, or omit the output if the rank's share is full.

        `lost` is True if the output is missing from the rank's log file.
        """
        if self._has_room(message.rank):
            self._add(message.rank, message.stream, message.text)
        else:
            self._gap(message.rank, message.stream).leave_out(message.text, size, lost)
            self.dropped_bytes += size

    def skip(self, rank: int, stream: str, size: int, lost: bool) -> None:
        """Report a gap at the current position of the output."""
        gap = self._gap(rank, stream)
        gap.leave_out("", size, lost)
        gap.end = ""  # The stored text no longer ends at the end of the gap.
        if self._has_room(rank):
            self._own_up(rank)

    def first(self) -> protocol.Sendable | None:
        """Return the next message to send, or None if the queue is empty."""
        if not self._queue:
            return None
        head = self._queue[0]
        return protocol.Output(rank=head.rank, stream=head.stream, text=head.text) if isinstance(head, _Piece) else head

    def sent(self) -> None:
        """Remove the first message from the queue."""
        head = self._queue.popleft()
        if not isinstance(head, (_Piece, protocol.Skipped)):
            return
        rank = head.rank
        self._used[rank] -= _MESSAGE_CHARACTERS + (len(head.text) if isinstance(head, _Piece) else 0)
        if self._growing.get(rank) is head:
            del self._growing[rank]
        if rank in self._full and self._used[rank] <= self._share() // 2:
            self._full.discard(rank)
            self._own_up(rank)

    def _share(self) -> int:
        return min(RANK_CHARACTERS_MAX, QUEUED_CHARACTERS_MAX // max(1, len(self._used)))

    def _has_room(self, rank: int) -> bool:
        self._used[rank] += 0  # This statement registers the rank, so that the rank counts in the shares.
        if self._used[rank] >= self._share():
            self._full.add(rank)
        return rank not in self._full

    def _add(self, rank: int, stream: str, text: str) -> None:
        piece = self._growing.get(rank)
        if piece is None or piece.stream != stream or len(piece.text) + len(text) > _MERGED_CHARACTERS_MAX:
            piece = self._growing[rank] = _Piece(rank, stream, "")
            self._queue.append(piece)
            self._used[rank] += _MESSAGE_CHARACTERS
        piece.text += text
        self._used[rank] += len(text)

    def _gap(self, rank: int, stream: str) -> _Gap:
        return self._gaps.setdefault((rank, stream), _Gap())

    def _own_up(self, rank: int) -> None:
        """Queue a rank's gap notices, followed by the last lines of each gap."""
        for key in [key for key in self._gaps if key[0] == rank]:
            gap = self._gaps.pop(key)
            before = gap.size
            end = gap.found()
            self.dropped_bytes -= before - gap.size
            for size, lost in ((gap.size - gap.lost, False), (gap.lost, True)):
                if size:
                    self._growing.pop(rank, None)
                    self._queue.append(protocol.Skipped(rank=rank, stream=key[1], bytes=size, lost=lost))
                    self._used[rank] += _MESSAGE_CHARACTERS
            if end:
                self._add(rank, key[1], end)


@dataclass
class _Piece:
    """Queued output that may grow until the supervisor sends it."""

    rank: int
    stream: str
    text: str


@dataclass
class _Gap:
    """A gap in one stream's output, with the last lines of the missing output."""

    size: int = 0
    lost: int = 0
    end: str = ""

    def leave_out(self, text: str, size: int, lost: bool) -> None:
        self.size += size
        self.lost += size if lost else 0
        self.end = (self.end + text)[-_END_CHARACTERS:]

    def found(self) -> str:
        """Return the last complete lines of the gap, and shorten the gap by these lines."""
        whole = self.end if len(self.end) < _END_CHARACTERS else self.end[self.end.find("\n") + 1 :]
        self.end = ""
        size = min(self.size, len(whole.encode(errors="replace")))
        self.size -= size
        self.lost = min(max(0, self.lost - size), self.size)
        return whole
