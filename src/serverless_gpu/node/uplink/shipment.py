"""Data of an attempt that the server lacks: bytes of logs by offset, facts, small outputs.

    logs/<rank>.<stream>, logs/<node>.telemetry
                          ── pieces, fair among streams, 1 MiB a report ──▶ answered ─▶ offset moves
    facts.jsonl           ── new lines ──▶
    results/, failures/, hang-<n>.txt ─ small ones inside of reports, large ones as blobs first (`upload.py`)

A restarted uplink knows no offsets: it asks with an empty piece for each log, and the server says where to go on. It
sends a piece again when the server wants it, because its own disk lost it. The ending asks for each log once more, so
that a lost last piece shows, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import Fact
from serverless_gpu.wire.attempts import File, LogPiece
from serverless_gpu.wire.base import INLINE_BYTES_MAX, INLINE_OUTPUT_BYTES_MAX, LOG_REPORT_BYTES_MAX

FACTS_MAX = 500
FILES_MAX = 1_000
_FACT_BYTES_MAX = 1 << 20
_SAMPLES = "telemetry"
_LOG_NAME = re.compile(rf"(\d+)\.(stdout|stderr|{_SAMPLES})")
_OUTPUT_NAME = re.compile(r"results/\d+\.pkl|failures/\d+\.(json|pkl|stack)|hang-(\d+-)?\d+\.txt")

Stream = tuple[int, str]


class LogShipment:
    """The logs of one attempt; `known` means that nothing of them has been sent before."""

    def __init__(self, directory: Path, *, known: bool) -> None:
        # whether telemetry is sent and counted, too; it comes every second, and no client waits for it
        self.samples = False
        self._directory = directory
        self._asks = not known
        self._offsets: dict[Stream, int] = {}
        self._first = 0

    def pieces(self) -> tuple[LogPiece, ...]:
        """Return the next bytes of all streams, as many as one report carries."""
        sizes = self._sizes()
        if self._asks:
            return tuple(_piece(stream, 0, b"") for stream in sizes)
        streams = [stream for stream, size in sizes.items() if size > self._offsets.get(stream, 0)]
        if not streams:
            return ()
        self._first = (self._first + 1) % len(streams)
        found, left = [], LOG_REPORT_BYTES_MAX
        for place, stream in enumerate(streams[self._first :] + streams[: self._first]):
            offset = self._offsets.get(stream, 0)
            share = left // (len(streams) - place)
            data = self._read(stream, offset, min(share, sizes[stream] - offset))
            if data:
                found.append(_piece(stream, offset, data))
                left -= len(data)
        return tuple(found)

    def closing(self, pieces: Sequence[LogPiece]) -> tuple[LogPiece, ...]:
        """Return an empty piece at the end of each stream that has none among these.

        They go with the ending: the server answers where it wants a stream to go on, if its disk has lost what it had.
        """
        named = {(piece.rank, piece.stream) for piece in pieces}
        sizes = self._sizes()
        return tuple(_piece(stream, size, b"") for stream, size in sizes.items() if size and stream not in named)

    def taken(self, pieces: Sequence[LogPiece], wanted: Mapping[str, int]) -> bool:
        """Note the answer (`ReportAnswer.offsets`) to these pieces; return whether the server had room."""
        has_room = True
        for piece in pieces:
            end = self._offsets[piece.rank, piece.stream] = piece.offset + len(piece.data)
            # It fits on to the stored bytes, and not all of it was taken: only a full disk does that.
            has_room = has_room and not piece.offset <= wanted.get(_key(piece.rank, piece.stream), end) < end
        for key, offset in wanted.items():
            rank, _, stream = key.partition(".")
            if rank.isdigit():
                self._offsets[int(rank), stream] = offset
        self._asks = False
        return has_room

    def ends_missing(self, pieces: Sequence[LogPiece]) -> dict[str, int]:
        """Return where those logs end that the server will not have whole with these pieces."""
        with_these = self._offsets | {(piece.rank, piece.stream): piece.offset + len(piece.data) for piece in pieces}
        return {_key(*stream): size for stream, size in self._sizes().items() if with_these.get(stream, 0) < size}

    def is_complete(self, pieces: Sequence[LogPiece]) -> bool:
        """Return whether the server has everything once it has these pieces."""
        if self._asks:
            return not pieces
        with_these = self._offsets | {(piece.rank, piece.stream): piece.offset + len(piece.data) for piece in pieces}
        return all(with_these.get(stream, 0) >= size for stream, size in self._sizes().items())

    def _sizes(self) -> dict[Stream, int]:
        found: dict[Stream, int] = {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    match = _LOG_NAME.fullmatch(entry.name)
                    if match is not None and (self.samples or self._asks or match[2] != _SAMPLES):
                        found[int(match[1]), match[2]] = entry.stat(follow_symlinks=False).st_size
        except OSError:  # deleted: nothing to send
            return found
        return dict(sorted(found.items()))

    def _read(self, stream: Stream, offset: int, length: int) -> bytes:
        try:
            with (self._directory / f"{stream[0]}.{stream[1]}").open("rb", buffering=0) as file:
                file.seek(offset)
                return file.read(length)
        except OSError:
            return b""


class FactsFile:
    """Facts of one attempt, reported and unreported ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._next = 0

    def unsent(self) -> tuple[Fact, ...]:
        """Return the next facts that the server has not."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_FACT_BYTES_MAX)
        except OSError:
            return ()
        facts, self._next = [], self._offset
        for line in data.splitlines(keepends=True)[:FACTS_MAX]:
            if not line.endswith(b"\n"):
                break  # half written
            self._next += len(line)
            try:
                facts.append(from_json(line, Fact))
            except msgspec.MsgspecError:  # a disk that was full in the middle of a line
                continue
        return tuple(facts)

    def is_complete(self) -> bool:
        """Return whether the server has all facts once it has what `unsent` returned last."""
        try:
            return self._next >= self._path.stat().st_size
        except OSError:
            return True

    def taken(self) -> None:
        """Note that the server has what `unsent` returned last."""
        self._offset = self._next


class OutputFile(NamedTuple):
    """A file of an attempt that the server is to have."""

    name: str
    path: Path
    size: int

    @property
    def is_small(self) -> bool:
        """Return whether it travels inside of a report."""
        return self.size <= INLINE_OUTPUT_BYTES_MAX


class Outputs:
    """The outputs of one attempt."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sent: set[str] = set()

    def unsent(self, *, ended: bool, failed: int | None = None) -> list[OutputFile]:
        """Return unreported outputs by name; before the end only stacks of a hang, and a rank's failure."""
        found = []
        early = set() if failed is None else {f"failures/{failed}.json", f"failures/{failed}.pkl"}
        for place in (".", "results", "failures") if ended else (".", "failures") if early else (".",):
            try:
                with os.scandir(self._directory / place) as entries:
                    files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            except OSError:
                continue
            for entry in files:
                name = entry.name if place == "." else f"{place}/{entry.name}"
                if place == "failures" and not ended and name not in early:
                    continue
                if name not in self._sent and _OUTPUT_NAME.fullmatch(name):
                    found.append(OutputFile(name, Path(entry.path), entry.stat().st_size))
        return sorted(found, key=lambda output: output.name)

    def inline(self, outputs: Sequence[OutputFile]) -> tuple[File, ...]:
        """Return as many of the small ones as one report carries; what cannot be read is not asked for again."""
        files: list[File] = []
        left = INLINE_BYTES_MAX
        for output in outputs:
            if not output.is_small or output.size > left or len(files) >= FILES_MAX:
                continue
            try:
                data = output.path.read_bytes()
            except OSError:
                self._sent.add(output.name)
                continue
            files.append(File(name=output.name, size=len(data), inline=data))
            left -= len(data)
        return tuple(files)

    def taken(self, files: Sequence[File]) -> None:
        """Note that the server has these."""
        self._sent.update(file.name for file in files)


def _key(rank: int, stream: str) -> str:
    return f"{rank}.{stream}"


def _piece(stream: Stream, offset: int, data: bytes) -> LogPiece:
    return LogPiece(
        rank=stream[0], stream=cast(Literal["stdout", "stderr", "telemetry"], stream[1]), offset=offset, data=data
    )
