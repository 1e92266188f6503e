"""`sgpu top`: shows live telemetry of this node, or prints one frame.

    monitor ─▶ FrameReader ─▶ tabulate ─▶ draw (`top_table.py`) ─▶ Terminal

`FrameReader` reads frames from the node monitor, and reconnects after failures. The device locks name runs of other
users and other home directories.

    with Terminal() as terminal:   alternate screen on, cursor off, no echo   ─▶   restored on every exit
        terminal.show(lines)       only lines that fit, without flicker
        terminal.wait(fds, 1.0)    until a descriptor is readable, a key is pressed or the window is resized

Ctrl-Z restores the normal screen until the user runs `fg`. SIGTERM or closing the terminal window ends the command. If
a terminal reports no size, the command assumes 80 columns and 24 lines. If stdin is not a terminal, the command reacts
only to Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import select
import signal
import socket
import sys
import termios
import tty
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import click
import msgspec

from serverless_gpu.ambient import SystemClock, format_clock
from serverless_gpu.cli.output import JsonType, json_option, print_json, say
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.cli.top_table import Around, DeviceOwner, Style, TopTable, draw, table_json, tabulate
from serverless_gpu.client.display.terminal_screen import fit
from serverless_gpu.errors import AgentUnavailable, StorageError
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.devices.locks import DeviceLocks, LockHolder, lock_directory
from serverless_gpu.node.monitor import start_stop
from serverless_gpu.node.monitor.frames import FrameReader

_FRAME_S = 1.0
_FIRST_S = 10.0
_COLUMNS_UNKNOWN = 120
_STEPS = {"up": -1, "down": 1, "page up": -10, "page down": 10}
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_SIZE_DEFAULT = os.terminal_size((80, 24))
_TERMINATED = 128 + signal.SIGTERM
_KEY = re.compile(rb"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])|.", re.DOTALL)
_KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"q": "quit", b"Q": "quit", b"\x04": "quit",
}  # fmt: skip


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and exit (default if stdout is not a terminal).")
@json_option(JsonType("cli.json_types:TopFrame"), text="Print one frame as JSON.")
def top(once: bool, as_json: bool) -> None:
    """Show GPUs, runs and ranks, live.

    The table lists the owner of each GPU and the ranks of each run. The command redraws the table once per second.
    """
    home = this_home()
    if starting_is_needed(home):
        say("sgpu: starting this node's monitor", err=True)
    feed = FrameReader(
        lambda: start_stop.ensure(home, os.environ), os.environ.get("SERVERLESS_GPU_FAKE", ""), SystemClock()
    )
    feed.open()
    try:
        if as_json:
            print_json(table_json(_first_table(feed, home)))
        elif once or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            table, style = _first_table(feed, home), _style(colour=False)
            columns = (os.get_terminal_size(1).columns if sys.stdout.isatty() else 0) or _COLUMNS_UNKNOWN
            for line in draw(table, columns=columns, style=style, user=user_name(os.environ)):
                say(line)
        else:
            _live(feed, home)
    finally:
        feed.close()


def starting_is_needed(home: Home) -> bool:
    """Return True if the node monitor is not running."""
    channel = start_stop.connect(home.sockets())
    if channel is not None:
        channel.close()
    return channel is None


def visible(lines: list[str], *, rows: int, columns: int, offset: int, status: str) -> tuple[list[str], int]:
    """Return the visible lines from `offset` with a status line, and the corrected offset."""
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


def _table(feed: FrameReader, home: Home) -> TopTable | None:
    if feed.frame is None:
        return None
    return tabulate(feed.frame, feed.before, look_around(feed.frame.devices, home.root, os.environ))


def _first_table(feed: FrameReader, home: Home) -> TopTable:
    """Return a table of the second frame, because device load needs two samples.

    Raise AgentUnavailable if the monitor sends no frame.
    """
    clock = SystemClock()
    deadline_ns = clock.boottime_ns() + int(_FIRST_S * 1e9)
    while (left_ns := deadline_ns - clock.boottime_ns()) > 0:
        select.select(feed.fds(), [], [], min(_FRAME_S, left_ns / 1e9))
        feed.take()
        if feed.before is not None:
            break
    table = _table(feed, home)
    if table is None:
        raise AgentUnavailable(feed.problem or "the monitor sends no frames", hint=f"read its log: {home.monitor_log}")
    return table


def _live(feed: FrameReader, home: Home) -> None:
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
        pass  # Users normally end the command with Ctrl-C.


def look_around(devices: Iterable[Device], home: Path, environ: Mapping[str, str]) -> Around:
    """Return the host name, user name, lock holders and quarantined devices."""
    holders: dict[str, DeviceOwner] = {}
    quarantined: dict[str, str] = {}
    by_kind: dict[DeviceKind, list[str]] = {}
    for device in devices:
        by_kind.setdefault(device.kind, []).append(device.uuid)
    for kind, uuids in by_kind.items():
        # If the device locks are missing or unreadable, the owners are unknown.
        with contextlib.suppress(StorageError):
            directory = lock_directory(kind, home)
            notes = DeviceLocks(directory).quarantined()
            quarantined |= {uuid: notes[uuid].reason for uuid in uuids if uuid in notes}
            holders |= {uuid: owner for uuid in uuids if (owner := _holder(directory, uuid)) is not None}
    return Around(node=socket.gethostname(), user=user_name(environ), holders=holders, quarantined=quarantined)


def user_name(environ: Mapping[str, str]) -> str:
    """Return the current user's name, or the UID in a container without user names."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return environ.get("USER") or str(os.getuid())


def _holder(directory: Path, uuid: str) -> DeviceOwner | None:
    note = held_note(directory / f"{uuid}.lock")
    if note is None:
        return None
    try:
        holder = from_json(note, LockHolder)
    except msgspec.MsgspecError:  # The lock file has no valid note yet, or another program holds the lock.
        return DeviceOwner(run_id="", name="", rank=None, user="")
    return DeviceOwner(run_id=holder.run_id, name="(session)" if holder.session else "", rank=None, user=holder.user)


class Terminal:
    """Full-screen output and key input on a terminal."""

    def __init__(self) -> None:
        self._out = sys.stdout.fileno()
        self._in = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._encoding = sys.stdout.encoding or "ascii"
        self._attributes: list[object] | None = None
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handlers: dict[int, object] = {}

    @property
    def size(self) -> os.terminal_size:
        """Return the terminal size, or 80 columns and 24 lines if the size is unknown."""
        try:
            size = os.get_terminal_size(self._out)
        except OSError:
            return _SIZE_DEFAULT
        return size if size.columns > 0 and size.lines > 0 else _SIZE_DEFAULT

    def __enter__(self) -> Terminal:
        for number in (signal.SIGWINCH, signal.SIGCONT, signal.SIGTERM, signal.SIGTSTP):
            self._handlers[number] = signal.signal(number, self._on_signal)
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # previous signal handler
        os.close(self._woken)

    def show(self, lines: Sequence[str]) -> None:
        """Replace the screen content. Raise OSError if the terminal is closed."""
        text = "\r\n".join(f"{line}\x1b[K" for line in lines[: self.size.lines])
        self._write(f"\x1b[H{text}\x1b[J")

    def wait(self, fds: Sequence[int], timeout_s: float) -> bool:
        """Wait for a readable descriptor, a key press or a resize. Return True if a descriptor is readable."""
        own = [fd for fd in (self._in, self._woken) if fd >= 0]
        readable, _, _ = select.select([*fds, *own], [], [], timeout_s)
        if self._woken in readable:
            os.eventfd_read(self._woken)
        return any(fd in readable for fd in fds)

    def keys(self) -> list[str]:
        """Return the key presses since the last call: ``"quit"`` and directions."""
        if self._in < 0 or not select.select([self._in], [], [], 0)[0]:
            return []
        pressed = os.read(self._in, 1024)
        if not pressed:  # The terminal window is closed.
            return ["quit"]
        return [_KEYS[key] for key in _KEY.findall(pressed) if key in _KEYS]

    def _take(self) -> None:
        if self._in >= 0:
            with contextlib.suppress(termios.error):
                self._attributes = termios.tcgetattr(self._in)
                tty.setcbreak(self._in)
        self._write(_ENTER)

    def _give(self) -> None:
        with contextlib.suppress(OSError):
            self._write(_LEAVE)
        if self._attributes is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSANOW, self._attributes)  # type: ignore[arg-type]  # saved by `tcgetattr`
            self._attributes = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            sys.exit(_TERMINATED)
        if number == signal.SIGTSTP:
            self._give()
            os.kill(os.getpid(), signal.SIGSTOP)  # After `fg`, execution continues on the next line.
            self._take()
        os.eventfd_write(self._woken, 1)

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(self._encoding, "replace"))
        while data:
            data = data[os.write(self._out, data) :]
