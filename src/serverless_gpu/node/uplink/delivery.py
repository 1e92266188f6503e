"""Sends an attempt's data to the server: logs by offset, facts, outputs.

    logs/<rank>.<stream>, logs/<node>.telemetry
                          ── LogShipment: pieces, fair among streams, 1 MiB a report ──▶ answered ─▶ offset moves
    facts.jsonl           ── FactsFile: new lines ──▶
    results/, failures/, hang-<n>.txt ── OutputDelivery: small files inside reports
                                            └─ Upload: large files as blobs first, in a separate thread
        hash in parts ─▶ query missing parts ─▶ send them ─▶ the next report names the file by its parts

A restarted uplink does not know the log offsets on the server. The uplink sends an empty piece for each log. The
server's answer contains the offset at which the uplink continues. The uplink sends a piece of a log again if the
server's disk has lost the piece. The report with the final state queries each log once more, so that the uplink also
detects a lost last piece.

A run whose results cannot be delivered does not succeed. If the server answers all requests except the upload for
`upload_s`, the attempt ends as `result_upload`. The failure message names the directory of the undelivered results.
While the uplink retries, the client displays the problem. After a cancel request, the uplink stops sending results at
once. A failed run does not wait for undelivered files and keeps its outcome.

Failure cases of an upload: After an interruption, the upload continues with the missing parts. If the server's store is
slow or returns errors, the uplink retries for `upload_s` and then reports the problem in the final state. If a file is
missing or changes during the upload, the uplink reports the problem at once. The node keeps its copy of the files until
the attempt is settled.
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
from serverless_gpu.operating_system import open_regular
from serverless_gpu.units import format_bytes, format_duration_ms
from serverless_gpu.wire.agents import NOT_SENT, File, LogPiece
from serverless_gpu.wire.base import INLINE_BYTES_MAX, INLINE_OUTPUT_BYTES_MAX, LOG_REPORT_BYTES_MAX
from serverless_gpu.wire.blobs import DigestList


class Delivered(NamedTuple):
    """Outputs and final state for one report."""

    files: tuple[File, ...]
    is_last: bool  # True if the server has all outputs after this report.
    stopped: Stopped  # The attempt's final state, which is a failure if its results did not arrive.
    sentence: str  # Progress message about the upload, or "".


class OutputDelivery:
    """Delivers the outputs of one attempt.

    `token` returns the attempt's current token.
    """

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
        """Return True while large outputs are being uploaded."""
        return self._upload is not None and not self._upload.done

    def before_the_end(self, failed: int | None = None) -> tuple[File, ...]:
        """Return the outputs of a running attempt: stacks of a hang and the failure of rank `failed`."""
        return self._outputs.inline(self._outputs.unsent(ended=False, failed=failed))

    def deliver(self, stopped: Stopped, upload_s: float, *, cancelled: bool) -> Delivered:
        """Return the outputs for the next report.

        The uplink tries to send large outputs for `upload_s` seconds. With `cancelled`, the uplink stops sending large
        outputs.
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
        """Record that the server has received these files."""
        self._outputs.taken(files)

    def answered(self) -> None:
        """Record an answer of the server. The time without upload progress counts from this call."""
        if self._upload is not None and self._tried_ns is None:
            self._tried_ns = self._clock.boottime_ns()

    def unanswered(self) -> None:
        """Record that the server is unreachable, so that the outage does not count against the upload."""
        self._tried_ns = None

    def refused(self, error: ServerlessGpuError, *, ended: bool) -> None:
        """Record that the server refused a report.

        `ended` is True if the report contained the final state.
        """
        # The upload starts again, because the server lost parts of a blob.
        if isinstance(error, NotFound) and self._upload is not None:
            self._upload.close()
            self._upload = None
        elif ended and isinstance(error, InvalidValue | TooLarge):
            self._refusal = f"the server refused the results: {error.message}"

    def close(self) -> None:
        """Cancel a running upload."""
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
        """Return the upload progress of large outputs, or the problem that delays the upload."""
        if self._upload is None:
            return ""
        if not self._upload.problem:
            return self._upload.sentence()
        waited = format_duration_ms(round(upload_s * 1000))
        return (
            f"{NOT_SENT}{self._upload.problem}. The results are on the node, which retries for {waited}. Stop "
            f"the retries: sgpu cancel {self._directory.parent.name}"
        )

    def _called_off(self, missing: Sequence[OutputFile], stopped: Stopped) -> str:
        """Return why the uplink does not send large outputs of a cancelled run, or "" if the upload continues."""
        upload = self._upload
        if upload is None or not missing or (stopped.state is not State.SUCCEEDED and not upload.problem):
            return ""
        why = f" ({upload.problem})" if upload.problem else ""
        return f"the run was cancelled during the upload of its results{why}. The results are in {self._directory}"

    def _given_up(self, missing: Sequence[OutputFile], upload_s: float) -> str:
        """Return why the server will not get the large outputs, or "" while their delivery is possible."""
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
        return f"{names} did not reach the server in {waited}{why}. The files are on the node, in {self._directory}"


_PARTS_ASKED_AT_ONCE = 1_000


class Upload:
    """Uploads an attempt's large outputs in a thread."""

    def __init__(self, outputs: Sequence[OutputFile], server: UplinkServer, token: Callable[[], str]) -> None:
        self.files: dict[str, File] = {}  # Files that are complete on the server.
        self.problem = ""  # The latest problem of the upload, or "".
        self.lost = ""  # Reason why the upload can never succeed, or "".
        self._outputs = outputs
        self._server = server
        self._line = server.line(token)
        self._sent_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return True once all files are on the server."""
        return len(self.files) == len(self._outputs)

    def sentence(self) -> str:
        """Return the progress of the upload."""
        total = sum(output.size for output in self._outputs)
        return f"sending results to the server: {format_bytes(min(self._sent_bytes, total))} of {format_bytes(total)}"

    def close(self) -> None:
        """Stop the upload."""
        self._ended.set()
        self._line.close()

    def _run(self) -> None:
        for output in self._outputs:
            backoff, problem = Backoff(), None
            while not self._ended.is_set():
                try:
                    self._send(output)
                except OSError as error:
                    self.lost = f"cannot read {output.path}: {error.strerror or error}"
                    return
                except ServerlessGpuError as error:
                    # Compare problems by type, because the numbers in a message may change between tries.
                    if type(error) is not problem:
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
            with open_regular(output.path) as file:
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
    """Return the digest of each part of a file. Raises OSError if the file is unreadable or has changed."""
    parts, read = [], 0
    with open_regular(path) as file:
        while data := file.read(BLOB_PART_BYTES):
            parts.append(blake3(data).hexdigest())
            read += len(data)
    if read != size:
        raise OSError(f"the file's size changed from {size} to {read} bytes")
    return tuple(parts)


FACTS_MAX = 500
FILES_MAX = 1_000
_FACT_BYTES_MAX = 1 << 20
_SAMPLES = "telemetry"
_LOG_NAME = re.compile(rf"(\d+)\.(stdout|stderr|{_SAMPLES})")
_OUTPUT_NAME = re.compile(r"results/\d+\.pkl|failures/\d+\.(json|pkl|stack)|hang-(\d+-)?\d+\.txt")

Stream = tuple[int, str]


class LogShipment:
    """Ships the logs of one attempt.

    `known` is True if no log has been sent before.
    """

    def __init__(self, directory: Path, *, known: bool) -> None:
        # True while telemetry counts as unsent data. No client waits for telemetry, which grows every second.
        self.samples = False
        self._directory = directory
        self._asks = not known
        self._offsets: dict[Stream, int] = {}
        self._first = 0

    def pieces(self) -> tuple[LogPiece, ...]:
        """Return the next bytes of all log streams, up to the size limit of one report."""
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
        """Return an empty piece for the end of each stream that has no piece in `pieces`.

        The uplink sends the empty pieces with the final state. If the server's disk lost data, the server's answer
        contains the offset to continue from.
        """
        named = {(piece.rank, piece.stream) for piece in pieces}
        sizes = self._sizes()
        return tuple(_piece(stream, size, b"") for stream, size in sizes.items() if size and stream not in named)

    def taken(self, pieces: Sequence[LogPiece], wanted: Mapping[str, int]) -> bool:
        """Apply the server's `wanted` offsets to log pieces. Return True if the server stored all pieces."""
        has_room = True
        for piece in pieces:
            end = self._offsets[piece.rank, piece.stream] = piece.offset + len(piece.data)
            # The server stores a consecutive piece completely unless the server's disk is full.
            has_room = has_room and not piece.offset <= wanted.get(_log_key(piece.rank, piece.stream), end) < end
        for key, offset in wanted.items():
            rank, _, stream = key.partition(".")
            if rank.isdigit():
                self._offsets[int(rank), stream] = offset
        self._asks = False
        return has_room

    def ends_missing(self, pieces: Sequence[LogPiece]) -> dict[str, int]:
        """Return the sizes of the logs that will still be incomplete on the server after these log pieces."""
        with_these = self._offsets | {(piece.rank, piece.stream): piece.offset + len(piece.data) for piece in pieces}
        return {_log_key(*stream): size for stream, size in self._sizes().items() if with_these.get(stream, 0) < size}

    def is_complete(self, pieces: Sequence[LogPiece]) -> bool:
        """Return True if the server has all logs after it has stored these log pieces."""
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
        except OSError:  # The uplink has no data to send, because the logs were deleted.
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
    """Tracks which facts of one attempt have been reported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._next = 0

    def unsent(self) -> tuple[Fact, ...]:
        """Return the next facts that the server does not have."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_FACT_BYTES_MAX)
        except OSError:
            return ()
        facts, self._next = [], self._offset
        for line in data.splitlines(keepends=True)[:FACTS_MAX]:
            if not line.endswith(b"\n"):
                break  # The supervisor has not completed the last line of facts.
            self._next += len(line)
            try:
                facts.append(from_json(line, Fact))
            except msgspec.MsgspecError:  # A full disk has truncated a line of facts.
                continue
        return tuple(facts)

    def is_complete(self) -> bool:
        """Return True if the server will have all facts once it has received the last result of `unsent`."""
        try:
            return self._next >= self._path.stat().st_size
        except OSError:
            return True

    def taken(self) -> None:
        """Record that the server has received the last result of `unsent`."""
        self._offset = self._next


class OutputFile(NamedTuple):
    """A file of an attempt that the uplink sends to the server."""

    name: str
    path: Path
    size: int

    @property
    def is_small(self) -> bool:
        """Return True if the file fits into a report."""
        return self.size <= INLINE_OUTPUT_BYTES_MAX


class Outputs:
    """Finds the unsent outputs of one attempt."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sent: set[str] = set()

    def unsent(self, *, ended: bool, failed: int | None = None) -> list[OutputFile]:
        """Return unsent outputs by name.

        Before the end of the attempt, return only hang stacks and the failure of rank `failed`.
        """
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
        """Return small outputs, up to the limit of one report. Skip unreadable outputs permanently."""
        files: list[File] = []
        left = INLINE_BYTES_MAX
        for output in outputs:
            if not output.is_small or output.size > left or len(files) >= FILES_MAX:
                continue
            try:
                with open_regular(output.path) as file:
                    data = file.read()
            except OSError:
                self._sent.add(output.name)
                continue
            files.append(File(name=output.name, size=len(data), inline=data))
            left -= len(data)
        return tuple(files)

    def taken(self, files: Sequence[File]) -> None:
        """Record that the server has received these files."""
        self._sent.update(file.name for file in files)


def _log_key(rank: int, stream: str) -> str:
    return f"{rank}.{stream}"


def _piece(stream: Stream, offset: int, data: bytes) -> LogPiece:
    return LogPiece(
        rank=stream[0], stream=cast(Literal["stdout", "stderr", "telemetry"], stream[1]), offset=offset, data=data
    )


def stopped_without_ranks(reason: Reason, detail: str, clock: Clock) -> Stopped:
    """Return the final state of an attempt that did not start or whose results could not be sent."""
    cause = Failure(rank=None, reason=reason, at_ns=clock.boottime_ns(), detail=detail) if detail else None
    return Stopped(state=MEANINGS[reason].state, reason=reason, cause=cause, consequences=())
