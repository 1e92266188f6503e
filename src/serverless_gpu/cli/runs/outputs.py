"""Output of ranks from files of this machine; `server_outputs.py` reads it from a server.

RunOutput ──▶ one OutputStream for each rank and stream ──pieces──▶ logs.py
"""

from __future__ import annotations

import abc
import codecs
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.runs.run_location import queued_runs
from serverless_gpu.client.runs.outcome import failed_rank
from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.attempt.history import NOT_STARTED, RunRecord, is_live, read_run, touched_ns
from serverless_gpu.node.base.home import Home

PIECE_BYTES = 1 << 16
_LAUNCH_S = 10.0  # a client may take that long from making the directory to handing the run over
_LOOK_S = 0.1


class OutputStream(abc.ABC):
    """One stream of one rank, and the position shown so far."""

    def __init__(self, rank: int, stream: str) -> None:
        self.rank = rank
        self.stream = stream
        self.has_written = False
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def skip_to_tail(self, lines: int) -> None:
        """Leave out everything but the last lines."""
        self._offset = tail_start(self.size(), self.read, lines)
        self.has_written = self.has_written or self._offset > 0

    def pieces(self) -> Iterator[bytes]:
        """Yield new output since the last call."""
        while data := self.read(self._offset, PIECE_BYTES):
            self._offset += len(data)
            self.has_written = True
            yield data

    def decode(self, data: bytes) -> str:
        """Return the next bytes as text."""
        return self._decoder.decode(data)

    @abc.abstractmethod
    def size(self) -> int:
        """Return how much there is now, in bytes."""

    @abc.abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """Return at most so many bytes from there on; none at the end, or where nothing was written."""


class RunOutput(abc.ABC):
    """Output of one run's ranks."""

    run_id: str
    look_s_max = _LOOK_S

    @abc.abstractmethod
    def ranks(self) -> int:
        """Return how many ranks there are, as far as that is known."""

    @abc.abstractmethod
    def written(self) -> list[int]:
        """Return the ranks that wrote anything."""

    @abc.abstractmethod
    def failed_rank(self) -> int | None:
        """Return the first rank that failed; None where no rank did, or the run goes on."""

    @abc.abstractmethod
    def source(self, rank: int, stream: str) -> OutputStream:
        """Return one stream of one rank."""

    @abc.abstractmethod
    def goes_on(self) -> bool:
        """Return whether more output may come."""


class OwnOutput(RunOutput):
    """Output of a run of this machine."""

    def __init__(self, home: Home, record: RunRecord) -> None:
        self.run_id = record.run_id
        self._home = home
        self._record = record

    def ranks(self) -> int:
        """Return how many ranks there are, as far as that is known."""
        return max([self._record.world_size, 1, *(rank + 1 for rank in self.written())])

    def written(self) -> list[int]:
        """Return the ranks that wrote anything."""
        paths = (self._record.directory / "logs").glob("*.std*")
        return sorted({int(path.stem) for path in paths if path.stem.isdecimal()})

    def failed_rank(self) -> int | None:
        """Return the first rank that failed; None where no rank did, or the run goes on."""
        return None if self._record.stopped is None else failed_rank(self._record.stopped)

    def source(self, rank: int, stream: str) -> OutputStream:
        """Return one stream of one rank."""
        return _File(self._record.directory, rank, stream)

    def goes_on(self) -> bool:
        """Return whether more output may come; a run without a supervisor is queued or launching."""
        if is_live(self._record.directory):
            return True
        if read_run(self._home.runs, self.run_id).state != NOT_STARTED:
            return False
        idle_ns = SystemClock().wall_ns() - touched_ns(self._record.directory)
        return idle_ns < _LAUNCH_S * 1e9 or self.run_id in queued_runs(self._home)


class _File(OutputStream):
    def __init__(self, directory: Path, rank: int, stream: str) -> None:
        super().__init__(rank, stream)
        self._path = directory / "logs" / f"{rank}.{stream}"

    def size(self) -> int:
        """Return how much there is now, in bytes."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def read(self, offset: int, size: int) -> bytes:
        """Return at most so many bytes from there on."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)


def refuse_missing_attempt(run_id: str, attempt: int, last: int) -> None:
    """Raise InvalidValue unless the run had this attempt, counted from 1; `last` 0 means none started."""
    if 1 <= attempt <= last:
        return
    had = "has no attempt yet" if last == 0 else "had one attempt" if last == 1 else f"had attempts 1 to {last}"
    raise InvalidValue(f"run {run_id} {had}, not {attempt}", hint=f"sgpu show {run_id}")


def tail_start(end: int, read: Callable[[int, int], bytes], lines: int) -> int:
    """Return the offset of the last lines, reading backwards with `read(offset, count)`."""
    if lines == 0:
        return end
    position, wanted = end, lines
    while position > 0:
        start = max(0, position - PIECE_BYTES)
        data = read(start, position - start)
        if position == end and data.endswith(b"\n"):
            wanted += 1  # the end of the last line begins none
        count = data.count(b"\n")
        if count >= wanted:
            for _ in range(wanted):
                data = data[: data.rindex(b"\n")]
            return start + len(data) + 1
        wanted -= count
        position = start
    return 0
