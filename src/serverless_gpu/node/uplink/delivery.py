"""Data of an attempt on its way to the server: logs by offset, facts, outputs.

    logs/<rank>.<stream>, logs/<node>.telemetry
                          ── LogShipment: pieces, fair among streams, 1 MiB a report ──▶ answered ─▶ offset moves
    facts.jsonl           ── FactsFile: new lines ──▶
    results/, failures/, hang-<n>.txt ── OutputDelivery: small ones inside of reports
                                            └─ Upload: large ones as blobs first, in a thread of its own
        hash in parts ─▶ which of them are missing? ─▶ send these ─▶ the file is named by its parts in the next report

A restarted uplink knows no offsets: it asks with an empty piece for each log, and the server says where to go on. It
sends a piece again when the server wants it, because its own disk lost it. The ending asks for each log once more, so
that a lost last piece shows, too.

A run whose results cannot be delivered is no success: once the server has answered everything but the upload for long
enough, the attempt ends as `result_upload`, and its sentence says where the files are. Until then the client hears what
is in the way, and a cancel gives the results up at once. A failed run is not held up: it ends as it did, without the
file.

Failure cases of an upload: it is interrupted (it goes on with the missing parts); the server's store answers with
errors, or slowly (tried again for `upload_s`, then the ending says what was in the way); the file is gone or changes
while it is read (reported at once: no part of it is reliable). The node's copy stays until the attempt is settled.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec
from blake3 import blake3

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotFound, ServerlessGpuError, TooLarge
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, Failure, Reason, State
from serverless_gpu.model.spec import BLOB_PART_BYTES, BlobReference
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.node.uplink.server import Backoff, UplinkServer
from serverless_gpu.units import format_bytes, format_duration_ms
from serverless_gpu.wire.agents import NOT_SENT, File, LogPiece
from serverless_gpu.wire.base import INLINE_BYTES_MAX, INLINE_OUTPUT_BYTES_MAX, LOG_REPORT_BYTES_MAX
from serverless_gpu.wire.blobs import DigestList


class Delivered(NamedTuple):
    """Outputs for a report."""

    files: tuple[File, ...]
    is_last: bool  # whether the server then has everything it will ever have
    stopped: Stopped  # how the attempt ended, which may be that its results did not arrive
    sentence: str  # progress


class OutputDelivery:
    """The outputs of one attempt; `token` returns its token."""

    def __init__(self, directory: Path, server: UplinkServer, token: Callable[[], str], clock: Clock) -> None:
        self._directory = directory
        self._server = server
        self._token = token
        self._clock = clock
        self._outputs = Outputs(directory)
        self._upload: Upload | None = None
        self._tried_ns: int | None = None
        self._refusal = ""

    @property
    def is_uploading(self) -> bool:
        """Return whether large outputs are on their way."""
        return self._upload is not None and not self._upload.done

    def before_the_end(self, failed: int | None = None) -> tuple[File, ...]:
        """Return outputs of a running attempt: stacks of a hang, and the failure of rank `failed`."""
        return self._outputs.inline(self._outputs.unsent(ended=False, failed=failed))

    def deliver(self, stopped: Stopped, upload_s: float, *, cancelled: bool) -> Delivered:
        """Return the outputs for the next report.

        Large outputs are tried for `upload_s`; `cancelled` gives them up.
        """
        unsent = self._outputs.unsent(ended=True)
        files = self._outputs.inline(unsent) + self._uploaded(unsent)
        named = {file.name for file in files}
        missing = [output for output in unsent if output.name not in named]
        called_off = self._called_off(missing, stopped) if cancelled else ""
        problem = self._refusal or called_off or self._given_up(missing, upload_s)
        if not problem or (not self._refusal and any(output.is_small for output in missing)):
            return Delivered(files, not missing, stopped, self._sentence(upload_s) if missing else "")
        if stopped.state is State.SUCCEEDED:
            reason = Reason.CANCELLED if called_off else Reason.RESULT_UPLOAD
            stopped = stopped_without_ranks(reason, problem, self._clock)
        return Delivered(files, True, stopped, "")

    def taken(self, files: Sequence[File]) -> None:
        """Note that the server has these."""
        self._outputs.taken(files)

    def answered(self) -> None:
        """Note that the server answers: from now on an upload that does not get on counts."""
        if self._upload is not None and self._tried_ns is None:
            self._tried_ns = self._clock.boottime_ns()

    def unanswered(self) -> None:
        """Note that the server is away: that is not the upload's fault."""
        self._tried_ns = None

    def refused(self, error: ServerlessGpuError, *, ended: bool) -> None:
        """Record that the server refused a report; `ended` says that it held the ending with the last outputs."""
        if isinstance(error, NotFound) and self._upload is not None:  # parts of a blob are gone: once more
            self._upload.close()
            self._upload = None
        elif ended and isinstance(error, InvalidValue | TooLarge):
            self._refusal = f"the server did not take the results: {error.message}"

    def close(self) -> None:
        """Give up what is on its way."""
        if self._upload is not None:
            self._upload.close()

    def _uploaded(self, unsent: Sequence[OutputFile]) -> tuple[File, ...]:
        large = [output for output in unsent if not output.is_small]
        if large and self._upload is None:
            self._upload = Upload(large, self._server, self._token)
        if self._upload is None:
            return ()
        there = self._upload.files
        return tuple(there[output.name] for output in large if output.name in there)

    def _sentence(self, upload_s: float) -> str:
        """Return how far large outputs are, or what is in their way."""
        if self._upload is None:
            return ""
        if not self._upload.problem:
            return self._upload.sentence()
        waited = format_duration_ms(round(upload_s * 1000))
        return (
            f"{NOT_SENT}{self._upload.problem}; they are on the node, and are sent again for {waited}; "
            f"sgpu cancel {self._directory.parent.name} gives them up"
        )

    def _called_off(self, missing: Sequence[OutputFile], stopped: Stopped) -> str:
        """Return why large outputs of a cancelled run are not sent, or "" when they still are."""
        upload = self._upload
        if upload is None or not missing or (stopped.state is not State.SUCCEEDED and not upload.problem):
            return ""
        why = f" ({upload.problem})" if upload.problem else ""
        return f"it was cancelled while its results were sent to the server{why}; they are in {self._directory}"

    def _given_up(self, missing: Sequence[OutputFile], upload_s: float) -> str:
        """Return why the large outputs will not arrive, or "" while they may."""
        upload = self._upload
        if upload is None or not missing:
            return ""
        if upload.lost:
            return upload.lost
        if self._tried_ns is None or self._clock.boottime_ns() - self._tried_ns < upload_s * 1e9:
            return ""
        names = ", ".join(output.name for output in missing[:3]) + (" …" if len(missing) > 3 else "")
        waited = format_duration_ms(round(upload_s * 1000))
        why = f": {upload.problem}" if upload.problem else ""
        return f"{names} did not get to the server in {waited}{why}; the files are on the node, in {self._directory}"


_PARTS_ASKED_AT_ONCE = 1_000


class Upload:
    """The large outputs of one attempt."""

    def __init__(self, outputs: Sequence[OutputFile], server: UplinkServer, token: Callable[[], str]) -> None:
        self.files: dict[str, File] = {}  # whole on the server
        self.problem = ""  # what was in the way last, or ""
        self.lost = ""  # why it can never be sent, or ""
        self._outputs = outputs
        self._server = server
        self._line = server.line(token)
        self._sent_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether everything is on the server."""
        return len(self.files) == len(self._outputs)

    def sentence(self) -> str:
        """Return how far it is."""
        total = sum(output.size for output in self._outputs)
        return f"sending results to the server: {format_bytes(min(self._sent_bytes, total))} of {format_bytes(total)}"

    def close(self) -> None:
        """Give up."""
        self._ended.set()
        self._line.close()

    def _run(self) -> None:
        for output in self._outputs:
            backoff, problem = Backoff(), None
            while not self._ended.is_set():
                try:
                    self._send(output)
                except OSError as error:
                    self.lost = f"{output.path} cannot be read: {error.strerror or error}"
                    return
                except ServerlessGpuError as error:
                    if type(error) is not problem:  # one sentence for one problem, whatever numbers are in it
                        self.problem, problem = error.message, type(error)
                    self._server.look_again()
                    self._ended.wait(backoff.next_s())
                else:
                    self.problem = ""
                    break
        self._line.close()

    def _send(self, output: OutputFile) -> None:
        parts = _digests(output.path, output.size)
        missing: set[str] = set()
        for start in range(0, len(parts), _PARTS_ASKED_AT_ONCE):
            asked = DigestList(digests=tuple(dict.fromkeys(parts[start : start + _PARTS_ASKED_AT_ONCE])))
            missing.update(self._line.get().ask("POST", "/blobs/missing", asked, answer=DigestList).digests)
        before = self._sent_bytes
        try:
            with output.path.open("rb") as file:
                for number, digest in enumerate(parts):
                    if digest in missing:
                        file.seek(number * BLOB_PART_BYTES)
                        self._line.get().put(f"/blobs/{digest}", file.read(BLOB_PART_BYTES))
                        missing.discard(digest)
                    self._sent_bytes += min(BLOB_PART_BYTES, output.size - number * BLOB_PART_BYTES)
        except ServerlessGpuError:
            self._sent_bytes = before
            raise
        faults.reach("after_parts_before_report")
        blob = BlobReference(size=output.size, parts=parts)
        self.files[output.name] = File(name=output.name, size=output.size, blob=blob)


def _digests(path: Path, size: int) -> tuple[str, ...]:
    """Return the digest of each part; raises OSError for an unreadable or changed file."""
    parts, read = [], 0
    with path.open("rb") as file:
        while data := file.read(BLOB_PART_BYTES):
            parts.append(blake3(data).hexdigest())
            read += len(data)
    if read != size:
        raise OSError(f"it has {read} bytes and had {size}")
    return tuple(parts)


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
            has_room = has_room and not piece.offset <= wanted.get(_log_key(piece.rank, piece.stream), end) < end
        for key, offset in wanted.items():
            rank, _, stream = key.partition(".")
            if rank.isdigit():
                self._offsets[int(rank), stream] = offset
        self._asks = False
        return has_room

    def ends_missing(self, pieces: Sequence[LogPiece]) -> dict[str, int]:
        """Return where those logs end that the server will not have whole with these pieces."""
        with_these = self._offsets | {(piece.rank, piece.stream): piece.offset + len(piece.data) for piece in pieces}
        return {_log_key(*stream): size for stream, size in self._sizes().items() if with_these.get(stream, 0) < size}

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


def _log_key(rank: int, stream: str) -> str:
    return f"{rank}.{stream}"


def _piece(stream: Stream, offset: int, data: bytes) -> LogPiece:
    return LogPiece(
        rank=stream[0], stream=cast(Literal["stdout", "stderr", "telemetry"], stream[1]), offset=offset, data=data
    )


def stopped_without_ranks(reason: Reason, detail: str, clock: Clock) -> Stopped:
    """Return the ending of an attempt that the uplink ends: it did not start, or its results could not be sent."""
    cause = Failure(rank=None, reason=reason, at_ns=clock.boottime_ns(), detail=detail) if detail else None
    return Stopped(state=MEANINGS[reason].state, reason=reason, cause=cause, consequences=())
