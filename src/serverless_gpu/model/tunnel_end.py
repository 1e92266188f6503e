"""One end of a tunnel: byte streams between a user and an attempt, over a connection that may break.

    user's end                          server                         node's end
    ──────────                          ──────                         ──────────
    open ─┐                                                            opened: connect to the target
    data ─┼─▶ frames 1, 2, 3 … ──▶ passes messages on, stores none ──▶ each frame once, in order
    end  ─┘ ◀── number of frames received, window ◀───────────────────

Each end numbers its frames and keeps them until the other end has received them. After a break, the end that reconnects
says how many frames it has received, and the other end sends the rest again. No byte is lost or doubled while both ends
exist, also if the server restarts.

A window limits the bytes of each stream that are under way. If a reader is slow or away, its peer therefore stops
reading from the source of that stream, and other streams continue.

The module contains no sockets, threads or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from serverless_gpu.model.endpoint import EndpointTarget

WINDOW_BYTES = 1 << 20
"""Maximum bytes of one stream that are under way in one direction."""
PIECE_BYTES = 64 << 10
STREAMS_MAX = 256
MESSAGE_BYTES_MAX = 1 << 20
ERROR_CHARACTERS_MAX = 1_000
_FRAMES_MAX = 500

Number = Annotated[int, msgspec.Meta(ge=1, lt=1 << 60)]
StreamId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="open"):
    """Opens a stream to a target in the attempt. Only the user's end sends this frame."""

    stream: StreamId
    target: EndpointTarget


class Data(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="data"):
    """Bytes of a stream."""

    stream: StreamId
    data: Annotated[bytes, msgspec.Meta(max_length=2 * PIECE_BYTES)]


class Window(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="window"):
    """Permits the other end to send more bytes of a stream."""

    stream: StreamId
    size: Size


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """Ends one direction of a stream: the sender has no more bytes."""

    stream: StreamId


class Close(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="close"):
    """Closes both directions of a stream at once, with the reason or ""."""

    stream: StreamId
    error: Annotated[str, msgspec.Meta(max_length=ERROR_CHARACTERS_MAX)] = ""


Frame = Open | Data | Window | End | Close


class TunnelMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Frames of one end, and the number of frames that it has received.

    Attributes:
        first: number of the first frame of `frames`.
        frames: consecutive frames.
        received: number of frames that the sender has received from the other end.
        again: True if the receiver must send all frames after `received` again, because a connection was lost.
    """

    first: Number = 1
    frames: Annotated[tuple[Frame, ...], msgspec.Meta(max_length=1_000)] = ()
    received: Size = 0
    again: bool = False


class _Stream:
    """Counts the bytes of a stream in both directions."""

    def __init__(self) -> None:
        self.room = WINDOW_BYTES  # Bytes that this end may still send.
        self.expected = WINDOW_BYTES  # Bytes that the other end may still send.
        self.used = 0  # Received bytes that the application has used since the last `Window`.
        self.ended_here = self.ended_there = False


class TunnelEnd:
    """The state of one end. The caller transfers messages and bytes.

    Raises ValueError from `receive` if the other end does not follow the protocol.
    """

    def __init__(self, *, opens: bool) -> None:
        self._opens = opens
        self._next_stream = 0
        self._streams: dict[int, _Stream] = {}
        self._kept: deque[tuple[int, Frame]] = deque()  # Frames that the other end has not confirmed.
        self._count = 0  # Frames created so far.
        self._sent = 0  # Number of the last frame handed out by `next_message`.
        self._received = 0
        self._told = 0  # Value of `received` in the last message.

    # --- this end's streams ---------------------------------------------------------------------------------------

    def open(self, target: EndpointTarget) -> int:
        """Open a stream to a target, and return the number of the stream."""
        self._next_stream += 1
        self._streams[self._next_stream] = _Stream()
        self._add(Open(stream=self._next_stream, target=target))
        return self._next_stream

    def room(self, stream: int) -> int:
        """Return the number of bytes that this end may send on a stream, or 0 after its end."""
        one = self._streams.get(stream)
        return 0 if one is None or one.ended_here else one.room

    def send(self, stream: int, data: bytes) -> None:
        """Send bytes on a stream, at most `room` bytes."""
        one = self._streams.get(stream)
        if one is None or one.ended_here:
            return  # The other end has closed the stream in the meantime.
        if len(data) > one.room:
            raise ValueError(f"{len(data)} bytes do not fit into a window of {one.room}")
        one.room -= len(data)
        for start in range(0, len(data), PIECE_BYTES):
            self._add(Data(stream=stream, data=data[start : start + PIECE_BYTES]))

    def use(self, stream: int, size: int) -> None:
        """Record that the application has used received bytes, so that the other end may send more."""
        one = self._streams.get(stream)
        if one is None:
            return
        one.used += size
        if one.used >= WINDOW_BYTES // 4 and not one.ended_there:
            self._add(Window(stream=stream, size=one.used))
            one.expected += one.used
            one.used = 0

    def end(self, stream: int) -> None:
        """End this end's direction of a stream."""
        one = self._streams.get(stream)
        if one is not None and not one.ended_here:
            one.ended_here = True
            self._add(End(stream=stream))
            self._forget(stream, one)

    def close(self, stream: int, error: str = "") -> None:
        """Close a stream in both directions."""
        if self._streams.pop(stream, None) is not None:
            self._add(Close(stream=stream, error=error[:ERROR_CHARACTERS_MAX]))

    # --- messages -------------------------------------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Return the number of frames that this end has received."""
        return self._received

    @property
    def has_news(self) -> bool:
        """Return True if `next_message` would return frames."""
        return self._sent < self._count

    @property
    def unconfirmed(self) -> int:
        """Return the number of received frames that no message has confirmed yet."""
        return self._received - self._told

    def next_message(self) -> TunnelMessage:
        """Return the next frames, and mark them as sent. The message may contain no frame."""
        frames: list[Frame] = []
        size = 0
        confirmed = self._count - len(self._kept)
        for index in range(self._sent - confirmed, len(self._kept)):
            frame = self._kept[index][1]
            size += len(frame.data) if isinstance(frame, Data) else 64
            if frames and (size > MESSAGE_BYTES_MAX or len(frames) >= _FRAMES_MAX):
                break
            frames.append(frame)
        first = self._sent + 1
        self._sent += len(frames)
        self._told = self._received
        return TunnelMessage(first=first, frames=tuple(frames), received=self._received)

    def rewind(self) -> None:
        """Send all unconfirmed frames again, because a message may be lost."""
        self._sent = self._count - len(self._kept)

    def receive(self, message: TunnelMessage) -> Iterator[Frame]:
        """Yield the new frames of a message for the application. Raises ValueError."""
        if message.received > self._count:
            raise ValueError(f"the other end confirms {message.received} frames, but this end sent {self._count}")
        while self._kept and self._kept[0][0] <= message.received:
            self._kept.popleft()
        self._sent = max(self._sent, self._count - len(self._kept))
        if message.again:
            if message.received < self._count - len(self._kept):
                raise ValueError("the other end has lost the state of the tunnel")
            self.rewind()
        for number, frame in enumerate(message.frames, message.first):
            if number == self._received + 1:  # Earlier frames are repeated; later frames follow a lost message.
                self._received = number
                yield from self._take(frame)

    def _take(self, frame: Frame) -> Iterable[Frame]:
        one = self._streams.get(frame.stream)
        match frame:
            case Open():
                if self._opens or frame.stream <= self._next_stream:
                    raise ValueError(f"the other end may not open stream {frame.stream}")
                self._next_stream = frame.stream
                if len(self._streams) >= STREAMS_MAX:
                    self._add(Close(stream=frame.stream, error=f"a tunnel has at most {STREAMS_MAX} streams"))
                    return ()
                self._streams[frame.stream] = _Stream()
                return (frame,)
            case _ if one is None:
                return ()  # This end has closed the stream before the frame arrived.
            case Data(data=data):
                one.expected -= len(data)
                if one.expected < 0 or one.ended_there:
                    raise ValueError(f"the other end sends too many bytes on stream {frame.stream}")
            case Window(size=size):
                one.room += size
            case End():
                one.ended_there = True
                self._forget(frame.stream, one)
            case Close():
                del self._streams[frame.stream]
        return (frame,)

    def _forget(self, stream: int, one: _Stream) -> None:
        if one.ended_here and one.ended_there:
            del self._streams[stream]

    def _add(self, frame: Frame) -> None:
        self._count += 1
        self._kept.append((self._count, frame))
