"""A terminal that shows one picture after the other: the other screen, keys at once, its size as it changes.

    with Terminal() as terminal:   other screen on, cursor off, no echo   ─▶   restored on every way out
        terminal.show(lines)       only what fits, without a flicker
        terminal.wait(fds, 1.0)    until one can be read, a key was pressed or the window has another size

Ctrl-Z gives the screen back until `fg`. SIGTERM and a closed window end the command. A window may have no size, and
stdin may be no terminal (no keys, but Ctrl-C).
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_USUAL = os.terminal_size((80, 24))
_TERMINATED = 128 + signal.SIGTERM
_KEY = re.compile(rb"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])|.", re.DOTALL)
_KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"q": "quit", b"Q": "quit", b"\x04": "quit",
}  # fmt: skip


class Terminal:
    """The terminal of this command, which is stdout's."""

    def __init__(self) -> None:
        self._out = sys.stdout.fileno()
        self._in = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._encoding = sys.stdout.encoding or "ascii"
        self._attributes: list[object] | None = None
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handlers: dict[int, object] = {}

    @property
    def size(self) -> os.terminal_size:
        """Return how many columns and lines there are; a terminal that does not know is taken for a usual one."""
        try:
            size = os.get_terminal_size(self._out)
        except OSError:
            return _USUAL
        return size if size.columns > 0 and size.lines > 0 else _USUAL

    def __enter__(self) -> Terminal:
        for number in (signal.SIGWINCH, signal.SIGCONT, signal.SIGTERM, signal.SIGTSTP):
            self._handlers[number] = signal.signal(number, self._signalled)
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what `signal` itself had returned
        os.close(self._woken)

    def show(self, lines: Sequence[str]) -> None:
        """Replace the screen with lines; raises OSError when the terminal is gone."""
        text = "\r\n".join(f"{line}\x1b[K" for line in lines[: self.size.lines])
        self._write(f"\x1b[H{text}\x1b[J")

    def wait(self, fds: Sequence[int], timeout_s: float) -> bool:
        """Wait for input on a descriptor, a key or a resize; return whether a descriptor is readable."""
        own = [fd for fd in (self._in, self._woken) if fd >= 0]
        readable, _, _ = select.select([*fds, *own], [], [], timeout_s)
        if self._woken in readable:
            os.eventfd_read(self._woken)
        return any(fd in readable for fd in fds)

    def keys(self) -> list[str]:
        """Return the keys pressed since the last call: ``"quit"`` and directions."""
        if self._in < 0 or not select.select([self._in], [], [], 0)[0]:
            return []
        pressed = os.read(self._in, 1024)
        if not pressed:  # its window is gone
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
                termios.tcsetattr(self._in, termios.TCSANOW, self._attributes)  # type: ignore[arg-type]  # its own
            self._attributes = None

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            sys.exit(_TERMINATED)
        if number == signal.SIGTSTP:
            self._give()
            os.kill(os.getpid(), signal.SIGSTOP)  # goes on here after `fg`
            self._take()
        os.eventfd_write(self._woken, 1)

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(self._encoding, "replace"))
        while data:
            data = data[os.write(self._out, data) :]
