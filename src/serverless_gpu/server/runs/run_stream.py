"""Streams the stored events and output of one run to one reader, at the reader's pace.

    hub ── run changed ─▶ look: one read of the database, then of the log files ─▶ messages ─▶ reader
     ▲                                                                                │
     └───────────── version read before the look ◀──── no more messages ◀─────────────┘

The server keeps no message queue for a slow reader, because the database and the log files contain all unread data. A
reader sends its position as `after` (the last event) and `offsets` (the next byte of each stream). A reader that
reconnects therefore receives each event and each byte exactly once.

For each attempt, the stream contains the events first, then the output, then the ending. The ending message follows the
last byte of output. The message with the receipt follows the ending message and closes the stream. For a run on several
nodes, the stream contains two ending messages. The server sends the first ending message once the cause is known and no
retry is possible. The early ending message contains the reports and files that the server has received so far. The
server sends the second ending message after all nodes have ended.

A token bucket per rank limits the output rate to 1 MB/s with a burst. The stream replaces excess output by a gap
message and the last lines. The log files contain the complete output. If a run has more output streams than
`LIVE_STREAMS_MAX`, the reader receives only the streams of the first ranks.

Failure cases:

- The reader disconnects. The caller of `RunStream` closes the stream.

- The server stops and closes the hub. The reader reconnects after the stream has closed without an ending message.

- Retention deletes the run. The server closes the stream of the deleted run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.model.spec import RANKS_MAX
from serverless_gpu.node.base.token_bucket import TokenBucket
from serverless_gpu.server.core.hub import Hub, run_key
from serverless_gpu.wire.base import LIVE_STREAMS_MAX
from serverless_gpu.wire.runs import (
    EndedMessage,
    GapMessage,
    LogMessage,
    RunView,
    SettledMessage,
    StateMessage,
    StreamMessage,
)

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
SHOWN_BYTES_PER_S = 1_000_000
SHOWN_BURST_BYTES = 8_000_000
"""Maximum output in bytes per rank that a late or returning reader receives immediately."""
PIECE_BYTES = 64 << 10
IDLE_S = 9.0
"""Seconds between keep-alive messages of an idle stream."""
_LINE_COST_BYTES = 64  # Rate-limit cost of a line in addition to its bytes, as in node/output/logs.py.
_LAST_LINES_BYTES = 4 << 10
# Maximum output in bytes per call, so that one reader does not block a thread for long.
_LOOK_BYTES_MAX = 1 << 20
_CLOSED_S = 1.0  # Seconds between checks of an exhausted token bucket.

Place = tuple[int, int, Stream]
"""Fence, rank and name of an output stream."""


class Files(Protocol):
    """Protocol with the methods of `Logs` that this module uses."""

    def read(self, run_id: str, fence: int, *, rank: int, stream: str, offset: int = 0, limit: int) -> bytes:
        """Return bytes of an output stream from an offset."""
        ...

    def size(self, run_id: str, fence: int, *, rank: int, stream: str) -> int:
        """Return the size of an output stream in bytes."""
        ...

    def sizes(self, run_id: str, fence: int) -> Mapping[tuple[int, str], int]:
        """Return the sizes of all output streams in bytes, by rank and stream."""
        ...


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state and the new events of a run, from one transaction."""

    run: RunView  # The current view of the run.
    events: tuple[StateMessage, ...] = ()  # New events for the reader, in order, without the ending message.
    ended: EndedMessage | None = None  # The ending message after the run's state has become final.
    # The early ending message, if the server knows the ending before all nodes have ended.
    early: EndedMessage | None = None
    may_be_early: bool = False  # True if the server may learn the ending without another event.
    settled: SettledMessage | None = None  # The last message of the stream, with the receipt.


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a reader in a stream."""

    after: int = 0  # Number (`seq`) of the last event that the reader has received.
    # Offset of the next byte to read in each output stream.
    offsets: dict[Place, int] = msgspec.field(default_factory=dict)
    # The ranks whose output the reader has requested, or None for the run's live ranks.
    ranks: tuple[int, ...] | Literal["all"] | None = None


class RunStream:
    """Streams a run to one reader.

    The stream calls `look` in a thread to read new events.
    """

    def __init__(
        self, run_id: str, position: Position, *, look: Callable[[int], RunSnapshot], files: Files, clock: Clock
    ) -> None:
        self._run_id = run_id
        self._look = look
        self._output = _Output(run_id, position, files, clock)
        self._after = position.after
        self._sentence = self._tracked = ""
        self._ended = self._early = False
        self._soon = False
        self._kept: RunSnapshot | None = None
        self.over = False

    async def messages(
        self, hub: Hub, in_thread: Callable[[Callable[[], list[StreamMessage]]], Awaitable[list[StreamMessage]]]
    ) -> AsyncIterator[StreamMessage | None]:
        """Yield messages, and None as a keep-alive, until the run is settled or the hub closes."""
        key, silent = run_key(self._run_id), False
        while not hub.closed:
            seen = hub.version(key)
            for message in await in_thread(self.next):
                silent = False
                yield message
            if self.over:
                return
            if self._output.more_to_read:
                continue
            if silent:
                yield None
            pause_s = _CLOSED_S if self._output.flooded or self._soon else IDLE_S
            silent = await hub.changed(key, seen, pause_s) == seen and not self._output.flooded

    def next(self) -> list[StreamMessage]:
        """Return a limited number of next messages. The call blocks while it reads the database and files."""
        look = self._kept or self._look(self._after)
        found = self._said(look)
        self._soon = look.may_be_early
        # An ending message is final and may contain the files of thousands of ranks. The stream therefore reads the
        # ending message only once, even if much output is still unread.
        self._kept = look if look.ended is not None and self._output.more_to_read else None
        return found

    def _said(self, look: RunSnapshot) -> list[StreamMessage]:
        found: list[StreamMessage] = []
        for event in look.events:
            if event.seq <= self._after:
                continue
            # The attempt's output must precede the event that ends the attempt.
            if event.fence and (event.state is State.QUEUED or event.state in TERMINAL):
                found += self._output.more(event.fence, look.run.spec.ranks_log, over=True)
                if self._output.more_to_read:
                    return found
            found.append(event)
            self._after = max(self._after, event.seq)
            self._sentence = event.sentence
        over = look.ended is not None
        found += self._output.more(look.run.fence, look.run.spec.ranks_log, over=over)
        if over and self._output.more_to_read:
            return found
        found += self._endings(look)
        if look.early is not None and not self._early and not self._output.more_to_read:
            self._early = True  # Other nodes' output and the final ending message still follow.
            found.append(look.early)
        # The stream sends no message about a changed wait reason if the sentence is unchanged.
        is_new = look.run.sentence not in ("", self._sentence) or look.run.tracked != self._tracked
        if is_new and not over:
            self._sentence, self._tracked = look.run.sentence, look.run.tracked
            found.append(_aside(look.run))
        return found

    def _endings(self, look: RunSnapshot) -> Iterator[StreamMessage]:
        if look.ended is not None and not self._ended:
            self._ended = True
            # A reader that reconnects for the receipt already has the ending message.
            if look.ended.seq > self._after:
                self._after = look.ended.seq
                yield look.ended
            # After a restore from a backup, the server continues with lower event numbers than the reader's.
            elif look.ended.seq < self._after:
                yield msgspec.structs.replace(look.ended, seq=0)
        if self._ended and look.settled is not None and not self.over:
            self.over = True
            yield look.settled


class _Output:
    """Reads the output of a run's ranks that the reader has not received yet."""

    def __init__(self, run_id: str, position: Position, files: Files, clock: Clock) -> None:
        self._run_id = run_id
        self._files = files
        self._clock = clock
        self._wanted = position.ranks
        self._offsets = dict(position.offsets)
        # A reader with an offset in a later attempt has already received all output of earlier attempts.
        self._first = max((fence for fence, _rank, _stream in position.offsets), default=1)
        self._buckets: dict[int, TokenBucket] = {}
        self._cut: set[Place] = set()
        self.more_to_read = False
        """True if the last call of `more` left output that the stream may send immediately."""
        self.flooded = False
        """True if the last call of `more` left output because a token bucket is empty."""

    def more(self, fence: int, shown: Sequence[int] | None, *, over: bool) -> list[StreamMessage]:
        """Return a limited amount of new output of an attempt.

        `shown` contains the ranks whose output the stream shows, or None for all ranks. If `over` is True, a gap
        message replaces the output above the rate limit.
        """
        self.more_to_read = self.flooded = False
        found: list[StreamMessage] = []
        if fence < self._first:
            return found
        left = _LOOK_BYTES_MAX
        for place in self._places(fence, shown):
            messages, taken = self._of(place, left, over)
            found += messages
            left -= taken
        return found

    def _places(self, fence: int, shown: Sequence[int] | None) -> list[Place]:
        wanted = shown if self._wanted is None else None if self._wanted == "all" else self._wanted
        if wanted is not None:
            ranks = list(dict.fromkeys(wanted))[: LIVE_STREAMS_MAX // len(STREAMS)]
            return [(fence, rank, stream) for rank in ranks for stream in STREAMS]
        # Skip telemetry samples, which a live stream does not contain.
        sizes = self._files.sizes(self._run_id, fence)
        there = sorted((rank, stream) for rank, name in sizes for stream in STREAMS if name == stream)
        return [(fence, rank, stream) for rank, stream in there[:LIVE_STREAMS_MAX]]

    def _of(self, place: Place, left: int, over: bool) -> tuple[list[StreamMessage], int]:
        """Return up to `left` bytes of new output of one stream, and the number of bytes."""
        fence, rank, stream = place
        at = self._offsets.get(place, 0)
        size = self._files.size(self._run_id, fence, rank=rank, stream=stream)
        found: list[StreamMessage] = []
        if place in self._cut and self._is_open(rank):
            self._cut.discard(place)
            if size - at > SHOWN_BYTES_PER_S:
                found += self._skipped(place, at, size)
                at = size
        taken = 0
        while at < size and taken < left and self._is_open(rank):
            data = self._read(place, at, min(PIECE_BYTES, size - at))
            if not data:
                break
            cost = len(data) + _LINE_COST_BYTES * data.count(b"\n")
            given = len(data) * self._bucket(rank).take(cost, self._clock.boottime_ns()) // max(1, cost)
            if given:
                found.append(LogMessage(fence=fence, rank=rank, stream=stream, offset=at, data=data[:given]))
            at += given
            taken += given
        if at < size and not self._is_open(rank):
            if over:
                found += self._skipped(place, at, size)
                at = size
            else:
                self._cut.add(place)
                self.flooded = True
        self.more_to_read |= at < size and place not in self._cut
        self._offsets[place] = at
        return found, taken

    def _skipped(self, place: Place, at: int, size: int) -> list[StreamMessage]:
        """Return the gap message for excess output, and a message with the last lines."""
        fence, rank, stream = place
        start = max(at, size - _LAST_LINES_BYTES)
        tail = self._read(place, start, size - start)
        if start > at:
            cut = tail.find(b"\n") + 1
            start, tail = start + cut, tail[cut:]
        found: list[StreamMessage] = []
        if start > at:
            found.append(GapMessage(fence=fence, rank=rank, stream=stream, offset=at, size=start - at))
        if tail:
            found.append(LogMessage(fence=fence, rank=rank, stream=stream, offset=start, data=tail))
        return found

    def _is_open(self, rank: int) -> bool:
        return self._bucket(rank).is_open(self._clock.boottime_ns())

    def _bucket(self, rank: int) -> TokenBucket:
        if rank not in self._buckets:
            self._buckets[rank] = TokenBucket(
                per_s=SHOWN_BYTES_PER_S,
                burst=SHOWN_BURST_BYTES,
                resume=SHOWN_BYTES_PER_S,
                now_ns=self._clock.boottime_ns(),
            )
        return self._buckets[rank]

    def _read(self, place: Place, at: int, size: int) -> bytes:
        fence, rank, stream = place
        return self._files.read(self._run_id, fence, rank=rank, stream=stream, offset=at, limit=size)


def _aside(run: RunView) -> StateMessage:
    return StateMessage(
        seq=0,
        fence=run.fence,
        state=run.state,
        reason=run.reason,
        sentence=run.sentence,
        node=run.node,
        tracked=run.tracked,
        waiting=run.waiting,
    )


def parse_offsets(text: str) -> dict[Place, int]:
    """Return the offsets in a text ``"<fence>.<rank>.<stream>:<next byte>,…"``."""
    found: dict[Place, int] = {}
    for item in filter(None, text.split(",")):
        place, _, offset = item.partition(":")
        parts = place.split(".")
        if len(parts) != 3 or parts[2] not in STREAMS or not all(_is_number(n) for n in (*parts[:2], offset)):
            raise InvalidValue(
                f"{item[:80]!r} is not an offset", hint="write offsets=<fence>.<rank>.<stream>:<next byte>,…"
            )
        found[int(parts[0]), int(parts[1]), "stderr" if parts[2] == "stderr" else "stdout"] = int(offset)
    if len(found) > 2 * LIVE_STREAMS_MAX:
        raise InvalidValue(f"the request has {len(found)} offsets, over the limit of {2 * LIVE_STREAMS_MAX}")
    return found


def parse_ranks(text: str) -> tuple[int, ...] | Literal["all"] | None:
    """Parse a list of ranks such as ``"0,3"``, or "" for the run's live ranks."""
    if text in ("", "all"):
        return "all" if text else None
    items = text.split(",")
    if len(items) > LIVE_STREAMS_MAX or not all(_is_number(item) and int(item) < RANKS_MAX for item in items):
        raise InvalidValue(f"{text[:80]!r} is not a list of ranks", hint="write the ranks as ranks=all or ranks=0,3")
    return tuple(int(item) for item in items)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18
