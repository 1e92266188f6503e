"""`sgpu logs`: what the ranks of a run wrote, now or while it goes on.

    logs/<rank>.<stream> ──tail──▶ decode ─▶ TerminalDisplay   as in the call itself
                         └──── --raw ──────▶ the bytes

Failure cases: a run that still waits or is being launched (followed until it has ended, too), a rank that wrote nothing
(said), files that grow without end (read in pieces), a run that ends while it is followed (what was written last is
still shown), a reader that goes away (click ends the command).
"""

from __future__ import annotations

import codecs
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import click

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.choosing import choose, queued_runs, this_home
from serverless_gpu.client.display import Display, TerminalDisplay
from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.history import NOT_STARTED, Record, is_live, read_run, touched_ns
from serverless_gpu.node.home import Home

_PIECE_BYTES = 1 << 16
_LOOK_S = 0.1
_LAUNCH_S = 10.0  # a client may take that long from making the directory to handing the run over
_INTERRUPTED = 130


@click.command()
@click.argument("run", required=False)
@click.option("--rank", default="0", show_default=True, metavar="N|all", help="The rank to show, or all of them.")
@click.option(
    "--stream", type=click.Choice(["stdout", "stderr", "both"]), default="both", show_default=True, help="Which output."
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each.")
@click.option("--follow", "-f", is_flag=True, help="Go on showing what is written until the run ends.")
@click.option("--raw", is_flag=True, help="The bytes as they were written, all on stdout.")
def logs(run: str | None, rank: str, stream: str, tail: int | None, follow: bool, raw: bool) -> None:
    """Show what a run wrote: stdout on stdout, stderr on stderr.

    RUN is an identifier, or any beginning or end of one that no other run has; without it, the latest run.
    """
    home = this_home()
    record = read_run(home.runs, choose(home, run))
    ranks = _ranks(record, rank)
    streams = ("stdout", "stderr") if stream == "both" else (stream,)
    sources = [_Source(record.directory, number, name) for number in ranks for name in streams]
    if tail is not None:
        for source in sources:
            source.skip_to_tail(tail)
    try:
        _show(sources, _display(raw=raw, tagged=len(ranks) > 1), lambda: follow and _goes_on(home, record))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    if tail != 0 and not any(source.has_written for source in sources):
        written = _written(record)
        others = f"; ranks that did: {', '.join(map(str, written))}" if written else ""
        where = "stdout or stderr" if stream == "both" else stream
        click.echo(f"run {record.run_id}: nothing of rank {rank} on {where}{others}", err=True)


def _ranks(record: Record, wanted: str) -> list[int]:
    count = max([record.world_size, 1, *(rank + 1 for rank in _written(record))])
    if wanted == "all":
        return list(range(count))
    if not (wanted.isascii() and wanted.isdigit() and int(wanted) < count):
        has = "only rank 0" if count == 1 else f"ranks 0 to {count - 1}"
        raise InvalidValue(f"run {record.run_id} has {has}, not {wanted!r}", hint="" if count == 1 else "or --rank all")
    return [int(wanted)]


def _goes_on(home: Home, record: Record) -> bool:
    """Return whether anything may still be written; a run that no supervisor has yet is launched, or waits its turn."""
    if is_live(record.directory):
        return True
    if read_run(home.runs, record.run_id).state != NOT_STARTED:
        return False
    idle_ns = SystemClock().wall_ns() - touched_ns(record.directory)
    return idle_ns < _LAUNCH_S * 1e9 or record.run_id in queued_runs(home)


def _written(record: Record) -> list[int]:
    return sorted({int(path.stem) for path in (record.directory / "logs").glob("*.std*") if path.stem.isdecimal()})


def _show(sources: Sequence[_Source], display: Display | None, goes_on: Callable[[], bool]) -> None:
    """Show what is there, and what comes as long as the run goes on; without a display, the bytes."""
    last = False
    while not last:
        last = not goes_on()  # asked before looking: what was written until the end is still shown
        for source in sources:
            for data in source.pieces():
                if display is None:
                    click.echo(data, nl=False)
                else:
                    display.output(source.rank, source.stream, source.decode(data))
        if not last:
            select.select([], [], [], _LOOK_S)
            if display is not None:
                display.tick()
    if display is not None:
        display.finish()


def _display(*, raw: bool, tagged: bool) -> Display | None:
    if raw:
        return None
    return TerminalDisplay(quiet=True, tagged=tagged, write=_write)


def _write(target: TextIO | None, text: str) -> str:
    """Write; a reader that is gone or a full disk is an error, unlike in a call."""
    click.echo(text, file=target, nl=False, color=True)  # color: click would take colours out of what goes into a file
    return ""


class _Source:
    """One file of output and how far it was shown."""

    def __init__(self, directory: Path, rank: int, stream: str) -> None:
        self.rank = rank
        self.stream = stream
        self._path = directory / "logs" / f"{rank}.{stream}"
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def has_written(self) -> bool:
        """Return whether there is anything in the file."""
        return self._offset > 0

    def skip_to_tail(self, lines: int) -> None:
        """Leave out everything but the last lines."""
        try:
            with self._path.open("rb") as file:
                self._offset = _tail_start(file.fileno(), lines)
        except OSError:
            return

    def pieces(self) -> Iterator[bytes]:
        """Yield what was written since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while data := file.read(_PIECE_BYTES):
                    self._offset += len(data)
                    yield data
        except FileNotFoundError:
            return

    def decode(self, data: bytes) -> str:
        """Return the next bytes as text."""
        return self._decoder.decode(data)


def _tail_start(fd: int, lines: int) -> int:
    """Return where the last lines of a file begin, reading it backwards."""
    end = position = os.fstat(fd).st_size
    if lines == 0:
        return end
    wanted = lines
    while position > 0:
        start = max(0, position - _PIECE_BYTES)
        data = os.pread(fd, position - start, start)
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
