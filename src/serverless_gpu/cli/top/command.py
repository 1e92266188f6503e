"""`sgpu top`: the live view, or one frame of it."""

from __future__ import annotations

import os
import select
import sys

import click

from serverless_gpu.ambient import SystemClock, format_clock
from serverless_gpu.cli.output import print_json, say
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.cli.top.data_source import Feed, look_around, user_name
from serverless_gpu.cli.top.picture import Style, TopTable, as_json, draw, tabulate
from serverless_gpu.cli.top.terminal import Terminal
from serverless_gpu.client.display.terminal import fit
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.monitor import control

_FRAME_S = 1.0
_FIRST_S = 10.0
_COLUMNS_UNKNOWN = 120
_STEPS = {"up": -1, "down": 1, "page up": -10, "page down": 10}


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and end; so it is when stdout is no terminal.")
@click.option("--json", "as_json_", is_flag=True, help="Print one frame as JSON.")
def top(once: bool, as_json_: bool) -> None:
    """Show what this node does now: each GPU, who has it, each run and its ranks; once a second.

    q or Ctrl-C ends it, the arrow keys scroll. The node's monitor is started if there is none.
    """
    home = this_home()
    if starting_is_needed(home):
        say("sgpu: no monitor runs on this node yet; it is started", err=True)
    feed = Feed(lambda: control.ensure(home, os.environ), os.environ.get("SERVERLESS_GPU_FAKE", ""), SystemClock())
    feed.open()
    try:
        if as_json_:
            print_json(as_json(_first(feed, home)))
        elif once or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            table, style = _first(feed, home), _style(colour=False)
            columns = (os.get_terminal_size(1).columns if sys.stdout.isatty() else 0) or _COLUMNS_UNKNOWN
            for line in draw(table, columns=columns, style=style, user=user_name(os.environ)):
                say(line)
        else:
            _live(feed, home)
    finally:
        feed.close()


def starting_is_needed(home: Home) -> bool:
    """Return whether the monitor is down."""
    channel = control.connect(home.sockets())
    if channel is not None:
        channel.close()
    return channel is None


def visible(lines: list[str], *, rows: int, columns: int, offset: int, status: str) -> tuple[list[str], int]:
    """Return the lines that fit below `offset`, with the status last, and the corrected offset."""
    room = max(1, rows - 1)
    offset = max(0, min(offset, len(lines) - room))
    below = len(lines) - offset - room
    more = f"{below} more lines below (arrow keys) · " if below > 0 else ""
    shown = lines[offset : offset + room]
    if rows < 2:
        return shown, offset
    return [*shown, *[""] * (room - len(shown)), fit(f"{more}{status}", columns)], offset


def _style(*, colour: bool) -> Style:
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return Style(colour=colour and not os.environ.get("NO_COLOR"), unicode=encoding.startswith("utf"))


def _table(feed: Feed, home: Home) -> TopTable | None:
    if feed.frame is None:
        return None
    return tabulate(feed.frame, feed.before, look_around(feed.frame.devices, home.root, os.environ))


def _first(feed: Feed, home: Home) -> TopTable:
    """Return the first frame with loads, which takes two samples; raise AgentUnavailable without one."""
    clock = SystemClock()
    deadline_ns = clock.boottime_ns() + int(_FIRST_S * 1e9)
    while (left_ns := deadline_ns - clock.boottime_ns()) > 0:
        select.select(feed.fds(), [], [], min(_FRAME_S, left_ns / 1e9))
        feed.take()
        if feed.before is not None:
            break
    table = _table(feed, home)
    if table is None:
        raise AgentUnavailable(feed.problem or "the monitor shows nothing", hint=f"what it wrote: {home.monitor_log}")
    return table


def _live(feed: Feed, home: Home) -> None:
    style, user, offset = _style(colour=True), user_name(os.environ), 0
    table: TopTable | None = None
    try:
        with Terminal() as terminal:
            while "quit" not in (keys := terminal.keys()):
                if feed.take() or table is None:
                    table = _table(feed, home)
                size = terminal.size
                lines = ["waiting for the first frame"]
                if table is not None:
                    lines = draw(table, columns=size.columns, style=style, user=user)
                offset += sum(_STEPS.get(key, 0) for key in keys)
                moment = "" if table is None else f"{format_clock(table.at_ns)} · "
                status = f"{moment}{feed.problem or 'q quits'}"
                shown, offset = visible(lines, rows=size.lines, columns=size.columns, offset=offset, status=status)
                terminal.show(shown)
                terminal.wait(feed.fds(), _FRAME_S)
    except KeyboardInterrupt:
        pass  # that is how it is ended
