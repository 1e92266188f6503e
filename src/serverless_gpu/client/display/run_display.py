"""Shows a run's wait reason, rank output and receipt.

    Run.follow ──▶ Display ──┬─ TerminalDisplay   a terminal, a file, a pipe
                             └─ NotebookDisplay   an IPython kernel (`notebook_display.py`)

The display prints a rank's stdout to stdout and a rank's stderr to stderr. A rank tag precedes each output line. The
display writes messages and notes about omitted output to stderr, because stdout belongs to user code.

In a queue of thousands of runs, the queue position changes every few seconds. On a terminal, each queue message
replaces the previous queue message (`WaitingLine`). In a file or a pipe, the display prints the first queue message
immediately. The interval between later queue messages doubles up to a maximum of five minutes.

On a terminal, the display redraws unfinished lines in place below the finished lines (`LiveBlock`):

    printed lines, final
    [rank 0]  45%|████▌     |        ◀─ the block: erased before other lines are printed, then drawn again
    [rank 3] loading …

The run continues if a stream is closed or a pipe has no reader. If the disk is full, the display prints one notice on
stderr. The display escapes characters that the stream's encoding does not support.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO, cast

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.client.display.terminal_screen import HELD_S, Screens, fit, safe
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.units import format_bytes

_REDRAW_S = 0.05
_GLIMPSE_TICK_S = 1.0
_LIVE_CHARACTERS_MAX = 2_000
_WAIT_TICK_S = 1.0
_STARTED = ("STARTING", "RUNNING")
_PASSING_S = 10.0  # Interval in seconds between progress messages in a file or pipe.
WAIT_ROWS_MAX = 4
_SAID_FIRST_S, _SAID_LAST_S = 10.0, 300.0
_WORTH_SAYING_S = 5.0
LIVE_ROWS_MAX = 8
_COLUMNS = 80  # Assumed width of a terminal that reports no width.


class LiveBlock:
    """Terminal rows that the display redraws in place."""

    def __init__(self) -> None:
        self._target: TextIO | None = None
        self._rows = 0

    @property
    def there(self) -> bool:
        """Return True while the terminal shows the rows."""
        return self._rows > 0

    def draw(self, target: TextIO, lines: Sequence[str]) -> None:
        """Replace the rows. Truncate the lines to the width and height of the terminal."""
        columns, height = _size(target)
        lines = lines[: max(1, height - 1)]
        if not lines:
            self.erase()
            return
        text = self._to_top() + "\r\n".join(fit(line, columns - 1) + "\x1b[K" for line in lines)
        write(target, text + ("\x1b[J" if len(lines) < self._rows else ""))
        self._target, self._rows = target, len(lines)

    def erase(self) -> None:
        """Erase the rows before printing other lines."""
        if self._rows:
            write(self._target, self._to_top() + "\x1b[J")
            self._rows = 0

    def _to_top(self) -> str:
        return "\r" + (f"\x1b[{self._rows - 1}A" if self._rows > 1 else "")


def is_terminal(target: TextIO | None) -> bool:
    """Return True if a stream is a terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return target is not None and target.isatty()
    return False


def live_target(stdout: TextIO | None, stderr: TextIO | None) -> TextIO | None:
    """Return the terminal for redrawn rows, or None without a terminal."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    return next((target for target in (stderr, stdout) if is_terminal(target)), None)


def columns_of(target: TextIO) -> int:
    """Return the number of columns of a terminal."""
    return _size(target)[0]


def write(target: TextIO | None, text: str) -> str:
    """Write and flush text. Return the reason for a failed write, such as a full disk, or ""."""
    if target is None:
        return ""
    try:
        try:
            target.write(text)
        except UnicodeEncodeError:
            encoding = target.encoding or "ascii"
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
        target.flush()
    except (BrokenPipeError, ValueError):  # The pipe has no reader, or the stream is closed.
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _size(target: TextIO) -> tuple[int, int]:
    try:
        columns, height = os.get_terminal_size(target.fileno())
    except (OSError, ValueError):
        return _COLUMNS, LIVE_ROWS_MAX + 1
    return columns or _COLUMNS, height or LIVE_ROWS_MAX + 1


class Display:
    """Base class of run displays. `Run.follow` calls a display from one thread."""

    # Interval in seconds between calls of `tick`, or None for no calls. The interval may change with every call.
    tick_s: float | None = None

    def output(self, rank: int, stream: str, text: str) -> None:
        """Show a piece of a rank's decoded output. The piece may have any size."""

    def skipped(self, rank: int, stream: str, bytes_: int, lost: bool) -> None:
        """Report omitted output at the current position.

        `lost` means that the log also lacks the omitted output.
        """

    def say(self, sentence: str) -> None:
        """Show a message of serverless-gpu."""

    def progress(self, sentence: str) -> None:
        """Show a progress message. The next progress message replaces the current progress message."""

    def state(self, state: str, sentence: str) -> None:
        """Show a new state of the run, or a new message about the state."""

    def waits(self, sentence: str, queued_ns: int | None) -> None:
        """Show the queue wait until the run state changes. Without `queued_ns`, the wait starts now."""

    def tick(self) -> None:
        """Update the display.

        While waiting for messages, `Run.follow` calls this method about every `tick_s` seconds.
        """

    def failure(self, tails: Mapping[int, str]) -> None:
        """Show the last output of ranks without live output, starting with the first failed rank."""

    def tracked(self, url: str) -> None:
        """Show the link to the run's MLflow page once."""

    def receipt(self, receipt: Receipt) -> None:
        """Show the receipt."""

    def finish(self) -> None:
        """Show unfinished output lines. `Run.follow` calls this method after the last output."""


class LineDisplay(Display):
    """Base class of displays that print complete output lines.

    With `quiet`, the display prints no messages of serverless-gpu except notes about omitted output.
    """

    def __init__(self, *, quiet: bool, logs: Path | str, clock: Clock | None) -> None:
        self._quiet = quiet
        self._logs = logs
        self._clock = clock or SystemClock()
        self._screens = Screens()
        self._wait = WaitingLine()
        self._since_ns = 0

    def failure(self, tails: Mapping[int, str]) -> None:
        """Print the last output of each rank, with rank tags."""
        for rank, tail in tails.items():
            self.say(f"last output of rank {rank} (all output: {self._logs_of(rank)}):")
            self._print(rank, "stderr", tail.split("\n"))

    def _print(self, rank: int, stream: str, lines: Sequence[str]) -> None:
        """Print a rank's finished output lines."""
        raise NotImplementedError

    def _begin_to_wait(self, sentence: str, queued_ns: int | None) -> None:
        now_ns = self._clock.boottime_ns()
        ago_ns = 0 if queued_ns is None else max(0, self._clock.wall_ns() - queued_ns)
        # Compute the start time once per wait, because the clocks of client and server may differ.
        if not self._wait.sentence:
            self._since_ns = now_ns - ago_ns
        self._wait.tell(sentence, since_ns=self._since_ns)

    def _logs_of(self, rank: int) -> str:
        """Return the log directory, or the command that prints the rank's output."""
        return str(self._logs) if isinstance(self._logs, Path) else f"`{self._logs} --rank {rank}`"

    def _missing(self, rank: int, stream: str, bytes_: int, lost: bool) -> str:
        """Return a note with the amount of omitted output and the log location."""
        log = self._logs / f"{rank}.{stream}" if isinstance(self._logs, Path) else self._logs_of(rank)
        where = "dropped" if lost else f"omitted (too fast for the terminal), see {log}"
        return f"[rank {rank}] — {format_bytes(bytes_)} {where} —\n"


class TerminalDisplay(LineDisplay):
    """Prints one run to a terminal, a file or a pipe.

    On a terminal, the display redraws unfinished lines and progress bars in place below the finished lines. In a file
    or a pipe, the display prints each output line once, in the line's final state. The display prints an unfinished
    progress bar every ten seconds. The function `write` returns the reason for a failed write, or "".
    """

    def __init__(
        self,
        *,
        quiet: bool,
        logs: Path | str = Path("logs"),
        clock: Clock | None = None,
        tagged: bool = True,
        write: Callable[[TextIO | None, str], str] = write,
    ) -> None:
        super().__init__(quiet=quiet, logs=logs, clock=clock)
        self._tagged = tagged
        self._write_to = write
        self._block = LiveBlock()
        self._drawn_ns = 0
        self._changed = False  # True if the rows on the terminal are outdated.
        self._told = False  # True after the display has reported a failed write.
        self._passing = ""
        self._passed_ns = self._clock.boottime_ns()
        self._tracked = ""

    def output(self, rank: int, stream: str, text: str) -> None:
        """Print a rank's finished output lines."""
        self._changed = True
        self._print(rank, stream, self._screens.feed(rank, stream, text, self._clock.boottime_ns()))
        self._refresh()

    def skipped(self, rank: int, stream: str, bytes_: int, lost: bool) -> None:
        """Print the amount of omitted output and the log location."""
        self._print(rank, stream, self._screens.end(rank, stream, broken=True))
        self._write("stderr", self._missing(rank, stream, bytes_, lost))
        self._refresh()

    def progress(self, sentence: str) -> None:
        """Show a progress message, below all lines on a terminal or periodically in a file or pipe."""
        if self._quiet:
            return
        now_ns = self._clock.boottime_ns()
        if live_target(standard_stream("stdout"), standard_stream("stderr")) is not None:
            self._passing, self._changed = f"serverless-gpu: {sentence}", True
            self._refresh()
        elif now_ns - self._passed_ns >= _PASSING_S * 1e9:
            self._passed_ns = now_ns
            self.say(sentence)

    def state(self, state: str, sentence: str) -> None:
        """Print the duration of the queue wait when the run starts."""
        self._passing = ""
        waited = self._wait.over(self._clock.boottime_ns())
        if waited and state in _STARTED:
            self.say(f"the run starts after {waited} in the queue")
        elif self._block.there:
            self._refresh()

    def waits(self, sentence: str, queued_ns: int | None) -> None:
        """Show the queue wait, below all lines on a terminal or periodically in a file or pipe."""
        if self._quiet:
            return
        self._passing = ""
        self._begin_to_wait(sentence, queued_ns)
        self._say_wait()
        self._changed = True
        self._refresh()

    def _say_wait(self) -> None:
        """Print the wait message periodically to a file or pipe."""
        if live_target(standard_stream("stdout"), standard_stream("stderr")) is None:
            line = self._wait.line(self._clock.boottime_ns())
            if line:
                self.say(line)

    def say(self, sentence: str) -> None:
        """Print a message of serverless-gpu."""
        self._passing = ""
        if not self._quiet:
            tty = is_terminal(standard_stream("stderr"))
            # A message may contain text from other users.
            text = "\n".join(safe(line, tty=tty) for line in sentence.split("\n"))
            self._write("stderr", f"serverless-gpu: {text}\n")
            self._refresh()

    def tick(self) -> None:
        """Print completed output lines, and redraw the unfinished lines."""
        now_ns = self._clock.boottime_ns()
        for rank, stream, lines in self._screens.settle(now_ns):
            self._print(rank, stream, lines)
        self._say_wait()
        for (rank, stream), screen in self._screens.by_stream.items():
            if not is_terminal(standard_stream(stream)):
                self._print(rank, stream, screen.glimpse(now_ns))
        self._refresh()

    def finish(self) -> None:
        """Print the output lines that have no final newline."""
        self._passing = ""
        self._wait.over(self._clock.boottime_ns())
        for rank, stream, lines in self._screens.end_all():
            self._print(rank, stream, lines)
        self._block.erase()
        self.tick_s = None

    def tracked(self, url: str) -> None:
        """Print the MLflow link of the run once."""
        if url and url != self._tracked:
            self._tracked = url
            self.say(f"MLflow: {safe(url, tty=True)}")

    def receipt(self, receipt: Receipt) -> None:
        """Print the brief receipt. `sgpu show` prints the full receipt."""
        for line in receipt.brief():
            self.say(line)

    def _print(self, rank: int, stream: str, lines: Sequence[str]) -> None:
        if lines:
            tty = is_terminal(standard_stream(stream))
            self._write(stream, "".join(f"{self._tag(rank)}{safe(line, tty=tty)}\n" for line in lines))

    def _tag(self, rank: int) -> str:
        return f"[rank {rank}] " if self._tagged else ""

    def _write(self, stream: str, text: str) -> None:
        self._block.erase()
        problem = self._write_to(standard_stream(stream), text)
        if problem and not self._told:
            self._told = True
            write(sys.stderr, f"serverless-gpu: cannot write to {stream}: {problem}; all output is in {self._logs}\n")

    def _refresh(self) -> None:
        """Redraw unfinished lines on a terminal at a limited rate, and update `tick_s`."""
        now_ns = self._clock.boottime_ns()
        target = live_target(standard_stream("stdout"), standard_stream("stderr"))
        if target is not None and (not self._block.there or now_ns - self._drawn_ns >= _REDRAW_S * 1e9):
            self._block.draw(target, self._live_lines(columns_of(target)))
            self._drawn_ns, self._changed = now_ns, False
        due_s = [_REDRAW_S] if target is not None and self._changed else []
        waits_s = self._wait.due_s(now_ns) if target is None else _WAIT_TICK_S if self._wait.sentence else None
        due_s += [] if waits_s is None else [waits_s]
        for (_, stream), screen in self._screens.by_stream.items():
            due_s += [HELD_S] if screen.held else []
            due_s += [_GLIMPSE_TICK_S] if screen.moving and not is_terminal(standard_stream(stream)) else []
        self.tick_s = min(due_s, default=None)

    def _live_lines(self, columns: int) -> list[str]:
        """Return the wait message and the most recent unfinished lines as rows."""
        shown = {key: screen for key, screen in self._screens.by_stream.items() if is_terminal(standard_stream(key[1]))}
        latest = sorted(shown, key=lambda key: shown[key].touched_ns, reverse=True)
        keys: list[tuple[int, str]] = []
        for key in latest:
            if sum(len(shown[taken].open_rows) for taken in keys) < LIVE_ROWS_MAX:
                keys.append(key)
        rows = [
            f"{self._tag(rank)}{safe(row[:_LIVE_CHARACTERS_MAX], tty=True)}"
            for rank, stream in sorted(keys)
            for row in shown[rank, stream].open_rows
        ]
        own = self._wait.rows(self._clock.boottime_ns(), columns) or ([self._passing] if self._passing else [])
        return [*(safe(line, tty=True) for line in own), *rows][:LIVE_ROWS_MAX]


def make_display(*, quiet: bool, logs: Path | str) -> Display:
    """Return a notebook display in an IPython kernel, or a terminal display otherwise."""
    if _in_kernel():
        # A lazy import avoids a circular import with the notebook display.
        module = importlib.import_module("serverless_gpu.client.display.notebook_display")
        return cast("Display", module.NotebookDisplay(quiet=quiet, logs=logs))
    return TerminalDisplay(quiet=quiet, logs=logs)


def second_interrupt_text() -> str:
    """Return the hint to press Ctrl-C or the notebook's stop button again."""
    return "press the stop button again" if _in_kernel() else "press Ctrl-C again"


def _in_kernel() -> bool:
    """Return True if this process is an IPython kernel."""
    package = sys.modules.get("IPython")
    get_ipython = getattr(package, "get_ipython", None)
    return get_ipython is not None and hasattr(get_ipython(), "kernel")


def standard_stream(stream: str) -> TextIO | None:
    """Return the current `sys.stdout` or `sys.stderr` by stream name."""
    return sys.stdout if stream == "stdout" else sys.stderr


def waited_text(seconds: float) -> str:
    """Format a duration with one or two units: ``"12 s"``, ``"2 h 5 min"``."""
    minutes = int(seconds // 60)
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


class WaitingLine:
    """Formats messages about a run's wait in the queue. All times are boot times in nanoseconds."""

    def __init__(self) -> None:
        self.sentence = ""
        self._since_ns = 0
        self._said = ""
        self._said_ns: int | None = None
        self._pause_s = _SAID_FIRST_S

    def tell(self, sentence: str, *, since_ns: int) -> None:
        """Set the wait message and the start time of the wait."""
        self.sentence, self._since_ns = sentence, since_ns

    def over(self, now_ns: int) -> str:
        """End the wait. Return the wait duration as text, or "" for a short wait."""
        was, self.sentence = self.sentence, ""
        waited_s = (now_ns - self._since_ns) / 1e9
        return waited_text(waited_s) if was and waited_s >= _WORTH_SAYING_S else ""

    def waited(self, now_ns: int) -> str:
        """Return the current wait duration as text."""
        return waited_text((now_ns - self._since_ns) / 1e9)

    def due_s(self, now_ns: int) -> float | None:
        """Return the seconds until the next wait message, or None without a new message."""
        if not self.sentence or self.sentence == self._said:
            return None
        return 0.0 if self._said_ns is None else max(0.0, self._pause_s - (now_ns - self._said_ns) / 1e9)

    def line(self, now_ns: int) -> str:
        """Return the wait message, or "" before the next interval."""
        if self.due_s(now_ns) != 0.0:
            return ""
        if self._said_ns is not None:
            self._pause_s = min(2 * self._pause_s, _SAID_LAST_S)
        self._said, self._said_ns = self.sentence, now_ns
        return self.sentence

    def rows(self, now_ns: int, columns: int) -> list[str]:
        """Return the wait message as terminal rows."""
        if not self.sentence:
            return []
        text = f"serverless-gpu: queued for {self.waited(now_ns)}: {self.sentence}"
        rows = textwrap.wrap(text, max(20, columns - 1), subsequent_indent="  ", break_on_hyphens=False)
        return (
            rows
            if len(rows) <= WAIT_ROWS_MAX
            else [*rows[: WAIT_ROWS_MAX - 1], f"{rows[WAIT_ROWS_MAX - 1][: columns - 4]} …"]
        )
