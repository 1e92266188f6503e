"""Reads rank output from pipes, masks secrets, stores output up to a limit, and sends it to clients.

    rank's fd 1, 2 ──pipe──▶ RankLog ─┬▶ logs/<rank>.stdout, .stderr   (every byte, up to a rate and a size per rank)
     [redaction, with secrets only]   │
                                      ├▶ OutputTail                    (last bytes as they arrived, for exceptions)
                                      └▶ LiveOutput                    (text, while a client shows this rank)

During an output flood, each chunk costs only one read call. The supervisor counts bytes above the limits but does not
process these bytes. Only a run with secrets also costs a search for its secrets, at about 10 to 100 MB/s. In the log
file, a marker line replaces the missing bytes. The log file always contains the last bytes of the output:

    head (byte-exact) ── "— 41.2 GB dropped until 12:01:03 (limit …) —" ── later output, or the last 256 KiB

Attached clients receive all output except during floods. If a client misses output, the supervisor sends a gap notice
even if the rank stops writing:

    chunk ─▶ no client? stop ───▶ bucket ──┬─ passes: decoded, in small pieces ──▶ viewer.output
                                           └─ too much: counted, not decoded ────▶ viewer.skipped, once the bucket
                                                                                   opens again, then the last lines

In each iteration of its event loop, the supervisor reads at most a limited number of bytes from a pipe. An output flood
from one rank therefore does not starve other ranks. The supervisor does not wait for end of file, because a grandchild
process may hold the pipe open forever. If the disk is full, the supervisor discards log bytes and continues the run.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from serverless_gpu.ambient import Clock, format_clock
from serverless_gpu.model.redaction import RedactedStream, Redactor
from serverless_gpu.node.base.token_bucket import TokenBucket
from serverless_gpu.units import format_bytes

STREAMS = ("stdout", "stderr")
STORED_BYTES_MAX = 1 << 30
STORED_BYTES_PER_S = 10_000_000
# Maximum bytes of an output burst that the supervisor stores regardless of the rate limit. A single output of 100 MB is
# not a flood.
STORED_BURST_BYTES = 256 << 20
_LIMIT = "limit 10 MB/s, 1 GiB per rank"
_READ_BYTES = 1 << 16  # Read size in bytes, equal to the default capacity of a pipe.
_FLOOD_BYTES = 1 << 18  # Pipe capacity and read size after a stream has filled its pipe. Larger reads are not faster.
_TURN_BYTES = 1 << 20
_READS_PER_TURN = 16
_CLOSING_TURNS_MAX = 64
_TAIL_LINES = 50
_TAIL_LINE_CHARACTERS_MAX = 2_000
_HIDDEN_RANKS_MAX = 8
_HIDDEN_LINES = 20
_HIDDEN_LINE_CHARACTERS_MAX = 500
KEPT_BYTES = 256 << 10
_PIECES_MAX = 512
_SMALL_BYTES = 4096  # Size up to which new data extends the last piece.
SHOWN_BYTES_PER_S = 1_000_000
SHOWN_BURST_BYTES = 2_000_000
# Additional cost of each line in bytes, for the tag, the terminal row and the printing time.
_LINE_COST_BYTES = 64
_PIECE_BYTES = 8 << 10  # A piece of this size fits into one packet even if JSON escapes every character.
_LAST_LINES_BYTES = 4 << 10


class RankLog:
    """The output streams of one rank.

    If `viewer` is set, `viewer` receives the output live. If `redactor` is set, it masks secrets in the output.
    """

    def __init__(
        self, rank: int, directory: Path, viewer: Viewer | None, clock: Clock, redactor: Redactor | None = None
    ) -> None:
        self.rank = rank
        self._clock = clock
        self._allowance = _Allowance(clock.boottime_ns())
        self._tail = OutputTail(STREAMS)
        self._live = None if viewer is None else LiveOutput(rank, STREAMS, viewer, self._tail.last, clock.boottime_ns())
        self._streams = {
            name: _Stream(name, directory / f"{rank}.{name}", None if redactor is None else redactor.stream())
            for name in STREAMS
        }

    @property
    def dropped_bytes(self) -> int:
        """Return the number of bytes missing from the log files."""
        return sum(stream.file.dropped_bytes for stream in self._streams.values())

    @property
    def unshown_bytes(self) -> int:
        """Return the number of live output bytes that attached clients did not receive."""
        return 0 if self._live is None else self._live.skipped_bytes

    @property
    def shown(self) -> bool:
        """Return True if attached clients receive this rank's output live."""
        return self._live is not None

    @property
    def behind(self) -> bool:
        """Return True if live output was omitted and `tend` must report the gap soon."""
        return self._live is not None and self._live.behind

    def write_ends(self) -> tuple[int, int]:
        """Return the file descriptors for the rank's stdout and stderr."""
        return self._streams["stdout"].write_fd, self._streams["stderr"].write_fd

    def close_write_ends(self) -> None:
        """Close the supervisor's copies of the write ends once the rank has its own copies."""
        for stream in self._streams.values():
            stream.close_write_end()

    def readers(self) -> list[tuple[int, Callable[[], bool]]]:
        """Return the descriptors to read and a callback for each descriptor.

        A read callback returns False at end of file.
        """
        return [(stream.read_fd, lambda s=stream: self._drain(s)) for stream in self._streams.values()]  # type: ignore[misc]  # mypy does not type a lambda's default

    def tail(self, lines: int = _TAIL_LINES, characters: int = _TAIL_LINE_CHARACTERS_MAX) -> str:
        """Return the last lines of both streams in order of arrival, each cut to its last `characters`."""
        return self._tail.text(lines, characters)

    def tend(self) -> None:
        """Report omitted output to attached clients after a flood has ended."""
        if self._live is not None and self._live.behind:
            self._live.tend(self._clock.boottime_ns())

    def close(self) -> None:
        """Read the remaining output from the pipes and close all files."""
        for stream in self._streams.values():
            with contextlib.suppress(OSError):
                # A process that still writes may be faster than the supervisor's reads.
                for _ in range(_CLOSING_TURNS_MAX):
                    if not self._drain(stream) or not stream.more:
                        break
            if stream.redacted is not None:
                self._pass_on(stream, stream.redacted.end())
            stream.file.end(self._tail.last(stream.name, min(KEPT_BYTES, stream.file.missing)), self._clock.wall_ns())
            stream.close()
        if self._live is not None:
            self._live.tend(self._clock.boottime_ns(), closing=True)

    def _drain(self, stream: _Stream) -> bool:
        stream.more = False
        read = 0
        for _ in range(_READS_PER_TURN):
            try:
                data = os.read(stream.read_fd, min(stream.read_bytes, _TURN_BYTES - read))
            except BlockingIOError:
                return True
            if not data:
                return False
            self._take(stream, data)
            read += len(data)
            if read >= _TURN_BYTES:
                break
        stream.more = True
        return True

    def _take(self, stream: _Stream, data: bytes) -> None:
        if len(data) == _READ_BYTES == stream.read_bytes:
            stream.expect_more()
        self._pass_on(stream, data if stream.redacted is None else stream.redacted.feed(data))

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        if not data:
            return
        now_ns = self._clock.boottime_ns()
        allowed = self._allowance.take(len(data), now_ns)
        kept = stream.file.store(data, allowed, self._clock)
        self._allowance.stored += kept
        self._tail.add(stream.name, data)
        if self._live is not None:
            self._live.take(stream.name, data, kept, now_ns)


def hidden_tails(logs: Mapping[int, RankLog], first: Sequence[int]) -> dict[int, str]:
    """Return the last output of a few ranks without live output, starting with the ranks in `first`."""
    tails: dict[int, str] = {}
    for rank in dict.fromkeys([*first, *logs]):
        if rank in logs and not logs[rank].shown and len(tails) < _HIDDEN_RANKS_MAX:
            text = logs[rank].tail(_HIDDEN_LINES, _HIDDEN_LINE_CHARACTERS_MAX)
            tails.update({rank: text} if text else {})
    return tails


def cut_output(logs: Sequence[RankLog], dropped_bytes: int | None) -> list[str]:
    """Return receipt notes about output that was not shown or not stored.

    `dropped_bytes` is the number of bytes that slow clients missed, or None if a server shows the output.
    """
    notes = []
    unshown = 0 if dropped_bytes is None else dropped_bytes + sum(log.unshown_bytes for log in logs)
    if unshown:
        notes.append(f"{format_bytes(unshown)} of live output were not shown. The stored output is in logs/")
    for log in logs:
        if log.dropped_bytes:
            dropped = format_bytes(log.dropped_bytes)
            notes.append(f"{dropped} of rank {log.rank}'s output were not stored. The rank's log marks the gaps")
    return notes


class _Allowance:
    """The remaining storage quota of a rank for stdout and stderr together."""

    def __init__(self, now_ns: int) -> None:
        self.stored = 0
        self._bucket = TokenBucket(
            per_s=STORED_BYTES_PER_S, burst=STORED_BURST_BYTES, resume=STORED_BYTES_PER_S, now_ns=now_ns
        )

    def take(self, wanted: int, now_ns: int) -> int:
        room = STORED_BYTES_MAX - self.stored
        return self._bucket.take(min(wanted, room), now_ns) if room > 0 else 0


class _File:
    """A log file, created with the first stored byte.

    Marker lines in the log file replace missing bytes.
    """

    def __init__(self, path: Path) -> None:
        self.missing = 0  # Number of missing bytes since the last stored byte.
        self._dropped = 0
        self._path = path
        self._fd = -1
        self._why = _LIMIT

    @property
    def dropped_bytes(self) -> int:
        return self._dropped + self.missing

    def store(self, data: bytes, allowed: int, clock: Clock) -> int:
        """Append the allowed part of a chunk to the file. Return the number of stored bytes."""
        kept = 0
        if allowed and (not self.missing or self._mark(self.missing, clock.wall_ns())):
            kept = self._append(memoryview(data)[:allowed])
        if kept < len(data):
            self._why = _LIMIT if kept == allowed else self._why
            self.missing += len(data) - kept
        return kept

    def end(self, last: bytes, wall_ns: int) -> None:
        """Append a marker line for missing output and the last output of the stream."""
        if not self.missing:
            return
        missing = self.missing - len(last)
        if not missing or self._mark(missing, wall_ns):
            kept = self._append(memoryview(last))
            self.missing = len(last) - kept

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _mark(self, missing: int, wall_ns: int) -> bool:
        line = f"\n— {format_bytes(missing)} dropped until {format_clock(wall_ns)} ({self._why}) —\n".encode()
        if self._append(memoryview(line)) < len(line):
            return False
        self._dropped += missing
        self.missing = 0
        return True

    def _append(self, data: memoryview) -> int:
        """Write data to the log file. Return the number of written bytes."""
        written = 0
        try:
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            while written < len(data):  # A write may be short if the disk has space for only a part of the data.
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self._why = error.strerror or type(error).__name__
        return written


class _Stream:
    def __init__(self, name: str, path: Path, redacted: RedactedStream | None) -> None:
        self.name = name
        self.redacted = redacted
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)
        self.read_bytes = _READ_BYTES
        self.more = False
        self.file = _File(path)

    def expect_more(self) -> None:
        """Increase the pipe capacity and the read size.

        Quiet streams keep small pipes, because the kernel limits each user's pipe memory.
        """
        self.read_bytes = _FLOOD_BYTES
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.read_fd, fcntl.F_SETPIPE_SZ, _FLOOD_BYTES)

    def close_write_end(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        self.close_write_end()
        os.close(self.read_fd)
        self.file.close()


class Viewer(Protocol):
    """Receiver of a rank's live output."""

    @property
    def watching(self) -> bool:
        """Return True while a client is attached."""
        ...

    def output(self, rank: int, stream: str, text: str, *, size: int, lost: bool) -> None:
        """Accept `size` bytes of output text.

        `lost` is True if the text is missing from the rank's log file.
        """
        ...

    def skipped(self, rank: int, stream: str, size: int, *, lost: bool) -> None:
        """Accept a notice about missing bytes at the current position."""
        ...


class LiveOutput:
    """The live view of one rank's output.

    `last(stream, size)` returns the last bytes of a stream.
    """

    def __init__(
        self, rank: int, streams: Sequence[str], viewer: Viewer, last: Callable[[str, int], bytes], now_ns: int
    ) -> None:
        self.skipped_bytes = 0  # Number of bytes omitted from the live view.
        self._rank = rank
        self._viewer = viewer
        self._last = last
        self._views = {stream: _View() for stream in streams}
        self._bucket = TokenBucket(
            per_s=SHOWN_BYTES_PER_S, burst=SHOWN_BURST_BYTES, resume=SHOWN_BYTES_PER_S, now_ns=now_ns
        )

    @property
    def behind(self) -> bool:
        """Return True if a gap notice is pending."""
        return any(view.size for view in self._views.values())

    def take(self, stream: str, data: bytes, kept: int, now_ns: int) -> None:
        """Show a chunk completely or partly.

        The rank's log file contains the first `kept` bytes of the chunk.
        """
        view = self._views[stream]
        if not self._viewer.watching:
            view.forget()
            return
        given = self._given(data, now_ns)
        start = 0
        if given and view.size:
            before = self._last(stream, len(data) + _LAST_LINES_BYTES)[: -len(data)]
            if b"\n" in before:
                self._resume(stream, view, before, now_ns)
            else:
                start = data.find(b"\n", 0, given) + 1  # The output resumes at the beginning of a line.
                view.miss(start, min(kept, start))
                self._own_up(stream, view)
        self._show(stream, view, data[start:given], lost=kept < given)
        view.miss(len(data) - given, max(0, kept - given))

    def tend(self, now_ns: int, *, closing: bool = False) -> None:
        """Report omitted output and its last lines after a flood has ended or when `closing` is True."""
        for stream, view in self._views.items():
            if not view.size or not (closing or self._bucket.is_open(now_ns)):
                continue
            self._resume(stream, view, self._last(stream, _LAST_LINES_BYTES), now_ns)

    def _resume(self, stream: str, view: _View, last: bytes, now_ns: int) -> None:
        """Report omitted output, then show the last lines of the gap."""
        lost = view.lost > 0
        end = last[-min(view.size, _LAST_LINES_BYTES) :]
        end = end[end.find(b"\n") + 1 :] if len(end) < view.size else end
        view.found(len(end))
        self._own_up(stream, view)
        self._given(end, now_ns)
        self._show(stream, view, end, lost=lost)

    def _given(self, data: bytes, now_ns: int) -> int:
        """Return the number of bytes of a chunk that may be shown now, without inspecting a flood."""
        if not self._bucket.is_open(now_ns):
            return 0
        cost = len(data) + _LINE_COST_BYTES * data.count(b"\n")
        return len(data) * self._bucket.take(cost, now_ns) // max(1, cost)

    def _own_up(self, stream: str, view: _View) -> None:
        for size, lost in ((view.size - view.lost, False), (view.lost, True)):
            if size:
                self._viewer.skipped(self._rank, stream, size, lost=lost)
        self.skipped_bytes += view.size
        view.forget()

    def _show(self, stream: str, view: _View, data: bytes, *, lost: bool) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            text = view.decoder.decode(piece)
            if text:
                self._viewer.output(self._rank, stream, text, size=len(piece), lost=lost)


class _View:
    """The live view of one stream: the decoder and the number of unreported omitted bytes."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.size = 0
        self.lost = 0

    def miss(self, size: int, kept: int) -> None:
        """Omit bytes from the live view.

        The log file contains `kept` of the omitted bytes.
        """
        if size:
            self.size += size
            self.lost += size - kept
            self.decoder.reset()

    def found(self, size: int) -> None:
        """Count a part of the omitted bytes as shown."""
        self.lost = max(0, self.lost - size)
        self.size -= size
        self.lost = min(self.lost, self.size)

    def forget(self) -> None:
        self.size = self.lost = 0
        self.decoder.reset()


class OutputTail:
    """Stores the last bytes that a rank wrote in order of arrival, and decodes them on demand.

        stdout  [chunk 1]      [chunk 4][chunk 5]     each stream has its own bound, so that a flood on one does not
        stderr        [chunk 2][chunk 3]              remove the end of the other; numbers: order of arrival

    Storing references to chunks avoids copies. Limits on the number of bytes and pieces bound the memory.
    """

    def __init__(self, streams: Sequence[str]) -> None:
        self._pieces = {stream: _Pieces() for stream in streams}
        self._number = 0

    def add(self, stream: str, data: bytes) -> None:
        """Add a chunk of a stream's output."""
        pieces = self._pieces[stream]
        if pieces.newest == self._number and len(data) < _SMALL_BYTES:
            pieces.grow(data)
            return
        self._number += 1
        pieces.add(self._number, data)

    def last(self, stream: str, size: int) -> bytes:
        """Return up to `size` of the last stored bytes of one stream."""
        return b"".join(data for _, data in self._pieces[stream].kept)[-size:] if size > 0 else b""

    def text(self, lines: int, characters: int) -> str:
        """Return the last lines of all streams in order of completion, then unfinished lines.

        The result has at most `lines` complete lines and one unfinished line per stream. Longer lines are cut to their
        last `characters`.
        """
        whole: deque[str] = deque(maxlen=lines)
        unfinished = dict.fromkeys(self._pieces, "")
        decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in self._pieces}
        numbered = ((number, stream, data) for stream, pieces in self._pieces.items() for number, data in pieces.kept)
        for _, stream, data in sorted(numbered, key=lambda piece: piece[0]):
            *ended, unfinished[stream] = (unfinished[stream] + decoders[stream].decode(data)).split("\n")
            whole.extend(ended[-lines:])
        found = [*whole, *(line for line in unfinished.values() if line)]
        # A carriage return rewrites a line, as in progress bars. The terminal shows only the last state of a rewritten
        # line.
        return "\n".join(line.rstrip("\r").rpartition("\r")[2][-characters:] for line in found)


class _Pieces:
    """The chunks of one stream from oldest to newest, each with its arrival number."""

    def __init__(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque()
        self._size = 0

    @property
    def newest(self) -> int:
        """Return the last piece's number, or -1 if the last piece can no longer grow."""
        return self.kept[-1][0] if self.kept and len(self.kept[-1][1]) < _SMALL_BYTES else -1

    def grow(self, data: bytes) -> None:
        number, before = self.kept.pop()
        self._size -= len(before)
        self.add(number, before + data)

    def add(self, number: int, data: bytes) -> None:
        self.kept.append((number, data))
        self._size += len(data)
        # Always keep the last piece, because `newest` limits its size.
        while len(self.kept) > 1 and (len(self.kept) > _PIECES_MAX or self._size - len(self.kept[0][1]) >= KEPT_BYTES):
            self._size -= len(self.kept.popleft()[1])
