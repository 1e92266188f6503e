"""`sgpu logs`: output of a run's ranks, once or followed.

    this machine: logs/<rank>.<stream>          ┬─tail──▶ decode ─▶ TerminalDisplay   as in the call itself
    server: /runs/{run}/logs/{rank}/{stream}    ┘    └──── --raw ──────▶ the bytes

Of a silent rank it names others with output. It shows the last output of a run that ends while it is followed.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import click

from serverless_gpu.cli.runs.outputs import OutputStream, OwnOutput, RunOutput, refuse_missing_attempt, served_output
from serverless_gpu.cli.runs.run_location import locate, this_home
from serverless_gpu.client.display.run_display import Display, TerminalDisplay
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hangs.hang_report import ranks_text
from serverless_gpu.node.attempt.history import read_run

_LOOK_S = 0.1


@click.command()
@click.argument("run", required=False)
@click.option(
    "--rank", metavar="N|all", help="The rank to show, or all; without it, the rank that failed first, else rank 0."
)
@click.option(
    "--stream", type=click.Choice(["stdout", "stderr", "both"]), default="both", show_default=True, help="Which output."
)
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Only this attempt; the last one without it.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each.")
@click.option("--follow", "-f", is_flag=True, help="Go on showing what is written until the run ends.")
@click.option("--raw", is_flag=True, help="The bytes as they were written, all on stdout.")
def logs(run: str | None, rank: str | None, stream: str, attempt: int | None, **options: Any) -> None:
    """Show what a run wrote: stdout on stdout, stderr on stderr.

    RUN is an identifier, or any beginning or end of one that no other run has; without it, the latest run. Of a run
    that had several attempts, the last one is shown, and with --follow those that come after it; with --attempt, that
    one alone.
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
                refuse_missing_attempt(found.run_id, attempt, 1)  # a run without a server has one
            output = OwnOutput(home, record)
        if rank is None:
            failed = output.failed_rank()  # the first one
            ranks = [failed or 0]
            if failed is not None and output.ranks() > 1:
                shown = f"rank {failed} of run {output.run_id} failed; --rank N or --rank all shows others"
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
    """Return the sentence about ranks that wrote nothing, with the option that shows those that did."""
    written = [rank for rank in output.written() if rank not in ranks]
    subject = f"rank {ranks[0]}" if len(ranks) == 1 else "the ranks"
    parts = [f"{subject} of run {output.run_id} wrote nothing to {where}"]
    if written:
        option = f"--rank {written[0]}" if len(written) == 1 else "--rank N"
        parts.append(f"{ranks_text(written)} did: sgpu logs {output.run_id} {option}")
    if output.failed_rank() in ranks:
        parts.append(f"how it ended: sgpu show {output.run_id}")
    return "; ".join(parts)


def _ranks(output: RunOutput, wanted: str) -> list[int]:
    count = output.ranks()
    if wanted == "all":
        return list(range(count))
    if not (wanted.isascii() and wanted.isdigit() and int(wanted) < count):
        has = "only rank 0" if count == 1 else f"ranks 0 to {count - 1}"
        raise InvalidValue(f"run {output.run_id} has {has}, not {wanted!r}", hint="" if count == 1 else "or --rank all")
    return [int(wanted)]


def _show(
    sources: Sequence[OutputStream], display: Display | None, goes_on: Callable[[], bool], look_s_max: float = _LOOK_S
) -> None:
    """Show the output so far and, while the run continues, new output; raw bytes without a display."""
    last, look_s = False, _LOOK_S
    while not last:
        last = not goes_on()  # asked before looking: what was written until the end is still shown
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
    """Write; a reader that is gone or a full disk is an error, unlike in a call."""
    click.echo(text, file=target, nl=False, color=True)  # color: click would take colours out of what goes into a file
    return ""
