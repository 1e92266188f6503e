"""`sgpu logs`: what the ranks of a run wrote, now or while it goes on.

    logs/<rank>.<stream>  ──tail──▶ decode ─▶ whole lines ─▶ what overwrote itself left out ─▶ terminal-safe ─▶ screen
                          └────────────────────────── --raw: the bytes ──────────────────────────────────────▶

Failure cases: a run that still waits or is being launched (followed until it has ended, too), a rank that wrote nothing
(said), files that grow without end (read in pieces), a run that ends while it is followed (what was written last is
still shown), a reader that goes away (click ends the command).
"""

from __future__ import annotations

import codecs
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.choosing import choose, queued_runs, this_home
from serverless_gpu.cli.screen import safe
from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.history import NOT_STARTED, Record, is_live, read_run, touched_ns
from serverless_gpu.node.home import Home

_PIECE_BYTES = 1 << 16
_LINE_BYTES_MAX = 1 << 20  # a line without end is shown in pieces
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
    sources = [_Source(record.directory, number, name, tagged=len(ranks) > 1) for number in ranks for name in streams]
    try:
        for source in sources:
            if tail is not None:
                source.skip_to_tail(tail)
            source.show(raw=raw)
        while follow and _goes_on(home, record):
            select.select([], [], [], _LOOK_S)
            for source in sources:
                source.show(raw=raw)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    for source in sources:
        source.show(raw=raw)
        source.finish()
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
        raise InvalidValue(f"run {record.run_id} has ranks 0 to {count - 1}, not {wanted!r}", hint="or --rank all")
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


class _Source:
    """One file of output and how far it was shown."""

    def __init__(self, directory: Path, rank: int, stream: str, *, tagged: bool) -> None:
        self._path = directory / "logs" / f"{rank}.{stream}"
        self._tag = f"[rank {rank}] " if tagged else ""
        self._err = stream == "stderr"
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""

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

    def show(self, *, raw: bool) -> None:
        """Print what was written since the last time."""
        for data in self._pieces():
            if raw:
                click.echo(data, nl=False)
                continue
            *lines, self._partial = (self._partial + self._decoder.decode(data)).split("\n")
            for line in lines:
                self._print(line)
            if len(self._partial) > _LINE_BYTES_MAX:
                self.finish()

    def finish(self) -> None:
        """Print a line that never got its end."""
        if self._partial:
            self._print(self._partial)
        self._partial = ""

    def _print(self, line: str) -> None:
        # A progress bar writes one line many times over: what a terminal would show in the end is the last of them.
        last = line.rstrip("\r").rpartition("\r")[2]
        tty = (sys.stderr if self._err else sys.stdout).isatty()
        click.echo(self._tag + safe(last, tty=tty), err=self._err, color=True if tty else None)

    def _pieces(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while data := file.read(_PIECE_BYTES):
                    self._offset += len(data)
                    yield data
        except FileNotFoundError:
            return


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
