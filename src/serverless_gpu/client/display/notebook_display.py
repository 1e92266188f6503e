"""Shows a run in a notebook cell, with rank output and a status display.

    ● RUNNING for 12 s                       one display, updated in place at most four times a second:
      rank 0   40%|████      | 4/10            state, progress bars
    [rank 0] loss 0.31                       ordinary stream output of the cell
    ● 2 × H100 · 41 s · verified free …      the receipt: a second display, which comes last

The notebook display prints rank output as plain stream text. Every notebook front end and `nbconvert` support stream
text. The display prints a finished progress bar as an output line. Before the run starts, the status display shows
messages of serverless-gpu. After the run has started, serverless-gpu prints messages to stderr. If updating the status
display fails, the run continues without the status display.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from serverless_gpu.ambient import Clock
from serverless_gpu.client.display.run_display import LineDisplay
from serverless_gpu.client.display.terminal_screen import safe
from serverless_gpu.model import markup
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.units import format_duration_ms

_TICK_S = 0.25
_RANKS_MAX = 16
_PROGRESS_CHARACTERS_MAX = 200
_BEFORE = ("QUEUED", "STARTING", "CAPTURING", "CAPTURED")
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "TIMED_OUT", "BUDGET_STOPPED", "LOST")


class StatusOutput(Protocol):
    """A notebook cell output that supports updates."""

    def show(self, bundle: dict[str, str]) -> None:
        """Replace the content of the cell output. Implementations may raise any exception."""


class KernelOutput:
    """Updatable output of the current notebook cell in IPython."""

    def __init__(self) -> None:
        self._handle: _Handle | None = None

    def show(self, bundle: dict[str, str]) -> None:
        """Show the content in all connected front ends."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]  # untyped IPython
        else:
            self._handle.update(bundle, raw=True)


class _Handle(Protocol):
    """Subset of `IPython.display.DisplayHandle` that this module uses."""

    def update(self, obj: Mapping[str, str], *, raw: bool) -> None: ...


class OutputStatus:
    """A cell output with a limited update rate."""

    def __init__(self, output: StatusOutput, clock: Clock) -> None:
        self._output = output
        self._clock = clock
        self._shown: dict[str, str] = {}
        self._shown_ns = 0
        self.broken = False

    @property
    def due(self) -> bool:
        """Return True if the minimum update interval has passed."""
        return not self._shown or self._clock.boottime_ns() - self._shown_ns >= _TICK_S * 1e9

    def show(self, plain: str, page: str, *, now: bool) -> None:
        """Show plain text and HTML. Unless `now` is set, skip updates within the minimum interval."""
        bundle = {"text/plain": plain, "text/html": page}
        if self.broken or self._shown == bundle or not (now or self.due):
            return
        self._shown, self._shown_ns = bundle, self._clock.boottime_ns()
        try:
            self._output.show(bundle)
        except Exception:  # noqa: BLE001 - a display error must not end the run
            self.broken = True


class NotebookDisplay(LineDisplay):
    """Shows one run in the current notebook cell.

    `status` is the cell output for the run state. `account` is the cell output for the receipt.
    """

    tick_s: float | None = _TICK_S

    def __init__(
        self,
        *,
        quiet: bool,
        logs: Path | str = Path("logs"),
        clock: Clock | None = None,
        status: StatusOutput | None = None,
        account: StatusOutput | None = None,
    ) -> None:
        super().__init__(quiet=quiet, logs=logs, clock=clock)
        self._status = OutputStatus(status or KernelOutput(), self._clock)
        self._account = OutputStatus(account or KernelOutput(), self._clock)
        self._state, self._sentence = "QUEUED", ""
        self._running_ns: int | None = None
        self._ran_ms: int | None = None
        self._finished = False
        self._accounted = False  # True after the receipt, which must be the last output.
        self._tracked = ""

    def output(self, rank: int, stream: str, text: str) -> None:
        """Print a rank's finished output lines. Show an unfinished line in the status display."""
        self._print(rank, stream, self._screens.feed(rank, stream, text, self._clock.boottime_ns()))
        self._show()

    def skipped(self, rank: int, stream: str, bytes_: int, lost: bool) -> None:
        """Print the amount of omitted output and the log location."""
        screen = self._screens.by_stream.get((rank, stream))
        # Start a new line, because the omitted output may contain a newline.
        if screen is not None and not screen.moving:
            self._print(rank, stream, self._screens.end(rank, stream, broken=True))
        _write("stderr", self._missing(rank, stream, bytes_, lost))

    def say(self, sentence: str) -> None:
        """Show a message in the status display before the run's start, and on stderr after the start."""
        if self._state in _BEFORE and not self._finished:
            self._sentence = sentence
            self._show()
        elif not self._quiet:
            _write("stderr", f"serverless-gpu: {sentence}\n")

    def progress(self, sentence: str) -> None:
        """Show a progress message in the status display."""
        self._sentence = sentence
        self._show()

    def state(self, state: str, sentence: str) -> None:
        """Show the run's state."""
        if state not in _BEFORE and self._running_ns is None:
            self._running_ns = self._clock.boottime_ns()
        if state in _ENDED and self._ran_ms is None:
            self._ran_ms = self._elapsed_ms()
        began = state != self._state
        self._wait.over(self._clock.boottime_ns())
        self._state, self._sentence = state, sentence
        if began or sentence:  # Skip an unchanged state without a message, to avoid flicker.
            self._show()

    def waits(self, sentence: str, queued_ns: int | None) -> None:
        """Show the reason and duration of the run's wait in the queue."""
        self._begin_to_wait(sentence, queued_ns)
        self._state, self._sentence = "QUEUED", sentence
        self._show()

    def tick(self) -> None:
        """Print completed output lines, and update the durations in the status display."""
        now_ns = self._clock.boottime_ns()
        for rank, stream, lines in self._screens.settle(now_ns):
            self._print(rank, stream, lines)
        self._show()

    def tracked(self, url: str) -> None:
        """Add the link to the MLflow run to the status display."""
        self._tracked = url
        self._show()

    def receipt(self, receipt: Receipt) -> None:
        """Show a brief receipt below the rank output. The user can expand the full receipt."""
        if self._quiet:
            return
        self._accounted = True
        self._account.show("\n".join(receipt.brief()), receipt.brief_html(), now=True)
        if self._account.broken:
            _write("stderr", "".join(f"serverless-gpu: {line}\n" for line in receipt.brief()))

    def finish(self) -> None:
        """Print output lines without a final newline, and show the final run state."""
        for rank, stream, lines in self._screens.end_all():
            self._print(rank, stream, lines)
        self._finished = True
        self._show()

    def _print(self, rank: int, stream: str, lines: Sequence[str]) -> None:
        if lines:
            # The front end may be a terminal, such as `jupyter console`.
            _write(stream, "".join(f"[rank {rank}] {safe(line, tty=True)}\n" for line in lines))

    def _show(self) -> None:
        if self._quiet or self._accounted or not (self._finished or self._status.due):
            return  # An early return keeps frequent output calls fast.
        state, sentence, lines = self._state, self._told(), self._progress()
        tracked = [f"MLflow: {self._tracked}"] if self._tracked else []
        plain = "\n".join([f"{state} {sentence}".strip(), *tracked, *lines])
        self._status.show(plain, markup.status(state, sentence, lines, self._tracked), now=self._finished)

    def _told(self) -> str:
        if self._state in _BEFORE:
            is_waiting = self._wait.sentence == self._sentence != ""
            return f"for {self._wait.waited(self._clock.boottime_ns())}: " * is_waiting + self._sentence
        if self._ran_ms is not None:
            return f"after {format_duration_ms(self._ran_ms)}"
        elapsed_ms = self._elapsed_ms()
        # A duration in whole seconds limits updates to one per second.
        elapsed = f"for {elapsed_ms // 1000} s" if elapsed_ms < 60_000 else f"for {format_duration_ms(elapsed_ms)}"
        return f"{elapsed}; {self._sentence}" if self._sentence else elapsed

    def _progress(self) -> list[str]:
        bars: dict[int, list[str]] = {}
        for (rank, _), screen in sorted(self._screens.by_stream.items()):
            if screen.moving:
                plain = (_COLOUR_CODE.sub("", row) for row in screen.open_rows)
                rows = ["".join(filter(str.isprintable, row)).strip() for row in plain]
                bars.setdefault(rank, []).extend(rows)
        shown = [
            f"rank {rank}  {'  '.join(told)}"[:_PROGRESS_CHARACTERS_MAX]
            for rank, told in list(bars.items())[:_RANKS_MAX]
        ]
        return shown if len(bars) <= _RANKS_MAX else [*shown, f"… and {len(bars) - _RANKS_MAX} more ranks"]

    def _elapsed_ms(self) -> int:
        started_ns = self._running_ns if self._running_ns is not None else self._clock.boottime_ns()
        return (self._clock.boottime_ns() - started_ns) // 1_000_000


def _write(stream: str, text: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    # The kernel flushes the stream five times per second. An explicit flush would block on a kernel thread. The run
    # must continue even if user code has closed or replaced the stream.
    with contextlib.suppress(Exception):
        if target is not None:
            target.write(text)
