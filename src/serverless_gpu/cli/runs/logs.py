"""`sgpu logs`: prints or follows the output of a run's ranks.

    this machine: logs/<rank>.<stream>          ┬─ RunOutput: one OutputStream   ┬─▶ decode ─▶ TerminalDisplay
    server: /runs/{run}/logs/{rank}/{stream}    ┘  for each rank and stream      └── --raw ──▶ the bytes

If the selected ranks wrote no output, the command names other ranks that wrote output. With --follow, the command also
prints the last output before the run ends. If the server is unreachable, the command prints one notice and waits. If
the server starts another attempt of the run, the command first prints the remaining output of the previous attempt.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import os
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.completion import complete_run
from serverless_gpu.cli.output import say
from serverless_gpu.cli.runs.run_location import locate, queued_runs, this_home
from serverless_gpu.cli.runs.run_rows import fetch_ending
from serverless_gpu.cli.server_connection import patient_server
from serverless_gpu.client.display.run_display import Display, TerminalDisplay
from serverless_gpu.client.runs.outcome import failed_rank
from serverless_gpu.errors import InvalidValue
from serverless_gpu.lazy_import import load
from serverless_gpu.model.hangs.hang_report import ranks_text
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.node.attempt.history import NOT_STARTED, RunRecord, is_live, read_run, touched_ns
from serverless_gpu.node.base.home import Home

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection
    from serverless_gpu.wire.runs import RunView

_LOOK_S = 0.1
PIECE_BYTES = 1 << 16
_LAUNCH_S = 10.0  # Maximum time in seconds between creating a run directory and the agent accepting the run.
_LOOK_S_MAX = 1.0
_RANKS_ASKED_MAX = 64
_READ_BYTES = 1 << 20


@click.command()
@click.argument("run", required=False, shell_complete=complete_run)
@click.option(
    "--rank",
    metavar="N|all",
    help="Rank to print, or all (default: the first failed rank, or rank 0 without a failure).",
)
@click.option(
    "--stream",
    type=click.Choice(["stdout", "stderr", "both"]),
    default="both",
    show_default=True,
    help="Streams to print.",
)
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of the attempt to print (default: the last attempt).",
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines of each stream.")
@click.option("--follow", "-f", is_flag=True, help="Print new output until the run ends.")
@click.option("--raw", is_flag=True, help="Print the raw bytes of all streams to stdout.")
def logs(run: str | None, rank: str | None, stream: str, attempt: int | None, **options: Any) -> None:
    """Print the output of a run.

    The command prints each rank's stdout to stdout and each rank's stderr to stderr. By default, the command prints the
    output of the last attempt. With --follow, the command also prints the output of later attempts. RUN is a run
    identifier, or the beginning or end of a run identifier. Without RUN, the command selects the latest run.
    """
    tail: int | None = options["tail"]
    follow: bool = options["follow"]
    home = this_home()
    found = locate(home, run)
    with contextlib.ExitStack() as stack:
        output: RunOutput
        if found.view is not None:
            output = stack.enter_context(served_output(home, found.view, attempt))
        else:
            record = read_run(home.runs, found.run_id)
            if attempt is not None:
                refuse_missing_attempt(found.run_id, attempt, 1)  # A local run has one attempt.
            output = OwnOutput(home, record)
        if rank is None:
            failed = output.failed_rank()
            ranks = [failed or 0]
            if failed is not None and output.ranks() > 1:
                shown = f"rank {failed} of run {output.run_id} failed (--rank N or --rank all prints other ranks)"
                click.echo(f"sgpu: {shown}", err=True)
        else:
            ranks = _ranks(output, rank)
        streams = ("stdout", "stderr") if stream == "both" else (stream,)
        sources = [output.source(number, name) for number in ranks for name in streams]
        if tail is not None:
            for source in sources:
                source.skip_to_tail(tail)
        display = None if options["raw"] else TerminalDisplay(quiet=True, tagged=len(ranks) > 1, write=_write)
        _show(sources, display, lambda: follow and output.goes_on(), output.look_s_max)
        if tail != 0 and not any(source.has_written for source in sources):
            where = "stdout or stderr" if stream == "both" else stream
            click.echo(f"sgpu: {_silence_text(output, ranks, where)}", err=True)


def _silence_text(output: RunOutput, ranks: Sequence[int], where: str) -> str:
    """Return a message that names ranks without output and suggests a rank with output."""
    written = [rank for rank in output.written_ranks() if rank not in ranks]
    subject = f"rank {ranks[0]}" if len(ranks) == 1 else "the ranks"
    parts = [f"{subject} of run {output.run_id} wrote nothing to {where}"]
    if written:
        option = f"--rank {written[0]}" if len(written) == 1 else "--rank N"
        parts.append(
            f"{ranks_text(written)} wrote output. To print the output, run: sgpu logs {output.run_id} {option}"
        )
    if output.failed_rank() in ranks:
        parts.append(f"print the failure with: sgpu show {output.run_id}")
    return "; ".join(parts)


def _ranks(output: RunOutput, wanted: str) -> list[int]:
    count = output.ranks()
    if wanted == "all":
        return list(range(count))
    if not (wanted.isascii() and wanted.isdigit() and int(wanted) < count):
        has = "only rank 0" if count == 1 else f"ranks 0 to {count - 1}"
        raise InvalidValue(
            f"run {output.run_id} has {has}, not {wanted!r}",
            hint="" if count == 1 else "print all ranks with --rank all",
        )
    return [int(wanted)]


def _show(
    sources: Sequence[OutputStream], display: Display | None, goes_on: Callable[[], bool], look_s_max: float = _LOOK_S
) -> None:
    """Print existing output, and new output until the run ends. Without a display, print raw bytes."""
    last, look_s = False, _LOOK_S
    while not last:
        last = not goes_on()  # Checking the run state before reading ensures complete output.
        look_s = min(look_s_max, 1.5 * look_s)
        for source in sources:
            for data in source.pieces():
                look_s = _LOOK_S
                if display is None:
                    click.echo(data, nl=False)
                else:
                    display.output(source.rank, source.stream, source.decode(data))
        if not last:
            select.select([], [], [], look_s)
            if display is not None:
                display.tick()
    if display is not None:
        display.finish()


def _write(target: TextIO | None, text: str) -> str:
    """Write text.

    Unlike the display of a Python call, raise an error for a closed pipe or a full disk.
    """
    # Without `color`, click removes colours from output to files.
    click.echo(text, file=target, nl=False, color=True)
    return ""


class OutputStream(abc.ABC):
    """One output stream of a rank, and the current read position."""

    def __init__(self, rank: int, stream: str) -> None:
        self.rank = rank
        self.stream = stream
        self.has_written = False
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def skip_to_tail(self, lines: int) -> None:
        """Skip all output except the last `lines` lines."""
        self._offset = tail_start(self.size(), self.read, lines)
        self.has_written = self.has_written or self._offset > 0

    def pieces(self) -> Iterator[bytes]:
        """Yield the output since the last call."""
        while data := self.read(self._offset, PIECE_BYTES):
            self._offset += len(data)
            self.has_written = True
            yield data

    def decode(self, data: bytes) -> str:
        """Decode the next bytes of the output stream."""
        return self._decoder.decode(data)

    @abc.abstractmethod
    def size(self) -> int:
        """Return the output stream's current size in bytes."""

    @abc.abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """Return at most `size` bytes of the output stream from `offset`."""


class RunOutput(abc.ABC):
    """Output of all ranks of one run."""

    run_id: str
    look_s_max = _LOOK_S

    @abc.abstractmethod
    def ranks(self) -> int:
        """Return the number of known ranks."""

    @abc.abstractmethod
    def written_ranks(self) -> list[int]:
        """Return the ranks that have written output."""

    @abc.abstractmethod
    def failed_rank(self) -> int | None:
        """Return the first rank that failed. Return None if no rank failed or the run continues."""

    @abc.abstractmethod
    def source(self, rank: int, stream: str) -> OutputStream:
        """Return one output stream of a rank."""

    @abc.abstractmethod
    def goes_on(self) -> bool:
        """Return True if ranks may write more output."""


class OwnOutput(RunOutput):
    """Output of a local run."""

    def __init__(self, home: Home, record: RunRecord) -> None:
        self.run_id = record.run_id
        self._home = home
        self._record = record

    def ranks(self) -> int:
        """Return the number of known ranks."""
        return max([self._record.world_size, 1, *(rank + 1 for rank in self.written_ranks())])

    def written_ranks(self) -> list[int]:
        """Return the ranks that have written output."""
        paths = (self._record.directory / "logs").glob("*.std*")
        return sorted({int(path.stem) for path in paths if path.stem.isdecimal()})

    def failed_rank(self) -> int | None:
        """Return the first rank that failed. Return None if no rank failed or the run continues."""
        return None if self._record.stopped is None else failed_rank(self._record.stopped)

    def source(self, rank: int, stream: str) -> OutputStream:
        """Return one output stream of a rank."""
        return _File(self._record.directory, rank, stream)

    def goes_on(self) -> bool:
        """Return True if ranks may write more output, also for a queued or launching run."""
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
        """Return the output stream's current size in bytes."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def read(self, offset: int, size: int) -> bytes:
        """Return at most `size` bytes of the output stream from `offset`."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)


def refuse_missing_attempt(run_id: str, attempt: int, last: int) -> None:
    """Raise InvalidValue unless the attempt number is between 1 and `last`.

    `last` is the number of attempts of the run.
    """
    if 1 <= attempt <= last:
        return
    had = (
        "has not started any attempt yet"
        if last == 0
        else "had one attempt"
        if last == 1
        else f"had attempts 1 to {last}"
    )
    raise InvalidValue(f"run {run_id} {had}, not {attempt}", hint=f"sgpu show {run_id}")


def tail_start(end: int, read: Callable[[int, int], bytes], lines: int) -> int:
    """Return the offset of the last lines. Read backwards with `read(offset, count)`."""
    if lines == 0:
        return end
    position, wanted = end, lines
    while position > 0:
        start = max(0, position - PIECE_BYTES)
        data = read(start, position - start)
        if position == end and data.endswith(b"\n"):
            wanted += 1  # The final line break does not start another line.
        count = data.count(b"\n")
        if count >= wanted:
            for _ in range(wanted):
                data = data[: data.rindex(b"\n")]
            return start + len(data) + 1
        wanted -= count
        position = start
    return 0


@contextlib.contextmanager
def served_output(home: Home, view: RunView, attempt: int | None = None) -> Iterator[RunOutput]:
    """Yield the output of a server run.

    `attempt=None` selects the last attempt and all later attempts.
    """
    with patient_server(home.root) as connection:
        yield ServedOutput(connection, view, attempt)


class ServedOutput(RunOutput):
    """Output of a server run. `attempt=None` selects the last attempt and all later attempts."""

    look_s_max = _LOOK_S_MAX

    def __init__(self, connection: Connection, view: RunView, attempt: int | None = None) -> None:
        if attempt is not None:
            refuse_missing_attempt(view.id, attempt, view.fence)
        self.run_id = view.id
        self._connection = connection
        self._view = view
        self._fence = view.fence if attempt is None else attempt
        self._is_last = attempt is None
        self._sources: list[_Log] = []
        self._next = 0

    def ranks(self) -> int:
        """Return the number of known ranks."""
        return self._view.processes or 1

    def written_ranks(self) -> list[int]:
        """Return the ranks that have written output."""
        ranks = range(min(self.ranks(), _RANKS_ASKED_MAX))
        return [
            rank
            for rank in ranks
            if any(
                _Log(self._connection, self.run_id, self._fence, rank, stream).size() for stream in ("stdout", "stderr")
            )
        ]

    def failed_rank(self) -> int | None:
        """Return the first rank that failed. Return None if no rank failed or a later attempt exists."""
        if self._view.state is not State.FAILED or self._fence != self._view.fence:
            return None
        found = fetch_ending(self._view)
        return None if found is None else failed_rank(found.stopped)

    def source(self, rank: int, stream: str) -> OutputStream:
        """Return one output stream of a rank."""
        source = _Log(self._connection, self.run_id, self._fence, rank, stream)
        self._sources.append(source)
        return source

    def goes_on(self) -> bool:
        """Return True if ranks may write more output.

        Switch to the next attempt after the previous attempt has ended.
        """
        if self._next:
            if self._fence:
                say(f"sgpu: attempt {self._next} of run {self.run_id}", err=True)
            self._fence, self._next = self._next, 0
            for source in self._sources:
                source.turn_to(self._fence)
        run_view = load("serverless_gpu.wire.runs").RunView
        self._view = self._connection.ask("GET", f"/runs/{self.run_id}", answer=run_view)
        if self._view.fence > self._fence:
            self._next = self._view.fence if self._is_last else 0
            return self._is_last
        return self._view.state not in TERMINAL


class _Log(OutputStream):
    def __init__(self, connection: Connection, run_id: str, fence: int, rank: int, stream: str) -> None:
        super().__init__(rank, stream)
        self._connection = connection
        self._path = f"/runs/{run_id}/logs/{rank}/{stream}"
        self._fence = fence
        self._complete = False

    def turn_to(self, fence: int) -> None:
        """Continue with the beginning of another attempt's output."""
        self._fence, self._offset, self._complete = fence, 0, False

    def pieces(self) -> Iterator[bytes]:
        """Yield the output since the last call. Send as few requests as possible."""
        while self._fence and not self._complete:
            data, headers = self._fetch(self._offset, _READ_BYTES)
            self._offset += len(data)
            self._complete = headers.get("SGPU-Complete") == "1"
            if data:
                self.has_written = True
                yield data
            if len(data) < _READ_BYTES:
                return

    def size(self) -> int:
        """Return the output stream's current size in bytes."""
        return int(self._fetch(0, 1)[1].get("SGPU-Size", 0)) if self._fence else 0

    def read(self, offset: int, size: int) -> bytes:
        """Return at most `size` bytes of the output stream from `offset`."""
        return self._fetch(offset, size)[0] if self._fence else b""

    def _fetch(self, offset: int, size: int) -> tuple[bytes, Mapping[str, str]]:
        query = {"fence": str(self._fence), "offset": str(offset), "limit": str(size)}
        return self._connection.fetch(self._path, query=query)
