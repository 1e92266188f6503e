"""What a person sees while a run goes on: rank lines, why it waits, the receipt.

    Run.follow ──▶ Display ──┬─ TerminalDisplay   a terminal, a file, a pipe
                             └─ NotebookDisplay   an IPython kernel (`notebook.py`)

What ranks write goes to the stream they wrote it to, each line tagged with its rank; what we say goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from serverless_gpu.model.ledger import Receipt
from serverless_gpu.units import format_bytes

_NOTEBOOK = "serverless_gpu.client.notebook"


class Display:
    """What `Run.follow` talks to; one run, one thread.

    Attributes:
        tick_s: how often `tick` wants to be called while nothing comes, or None; it may change with every call.
    """

    tick_s: float | None = None

    def output(self, rank: int, stream: str, text: str) -> None:
        """Take what a rank wrote, in pieces of any size.

        Args:
            rank: global rank.
            stream: ``"stdout"`` or ``"stderr"``.
            text: what it wrote, decoded.
        """

    def skipped(self, rank: int, stream: str, bytes_: int, lost: bool) -> None:
        """Take that output is missing here.

        Args:
            rank: global rank.
            stream: ``"stdout"`` or ``"stderr"``.
            bytes_: how much.
            lost: whether it is missing in the rank's file, too.
        """

    def say(self, sentence: str) -> None:
        """Show a sentence of ours."""

    def state(self, state: str, sentence: str) -> None:
        """Take that the run's state, or what it waits for, is another one now."""

    def tick(self) -> None:
        """Do what is due; called about every `tick_s` while the run is waited for."""

    def failure(self, tails: Mapping[int, str]) -> None:
        """Show the last output of ranks that were not shown live, after the run failed.

        Args:
            tails: last lines by rank, the rank that failed first in front.
        """

    def receipt(self, receipt: Receipt) -> None:
        """Show the receipt."""

    def finish(self) -> None:
        """Show what never got its newline; called once output is over."""


class TerminalDisplay(Display):
    """Prints one run.

    Args:
        quiet: print nothing of our own (rank output is still shown).
        logs: where the whole output of the ranks is.
    """

    def __init__(self, *, quiet: bool, logs: Path = Path("logs")) -> None:
        self._quiet = quiet
        self._logs = logs
        self._partial: dict[tuple[int, str], str] = {}

    def output(self, rank: int, stream: str, text: str) -> None:
        """Print the whole lines of what a rank wrote and keep the rest."""
        key = (rank, stream)
        *lines, self._partial[key] = (self._partial.get(key, "") + text).split("\n")
        if lines:
            self._write(stream, "".join(f"[rank {rank}] {line}\n" for line in lines))

    def skipped(self, rank: int, stream: str, bytes_: int, lost: bool) -> None:
        """Print how much is missing and where it is."""
        where = "dropped" if lost else f"not shown; all of it is in {self._logs / f'{rank}.{stream}'}"
        self._write("stderr", f"[rank {rank}] — {format_bytes(bytes_)} {where} —\n")

    def say(self, sentence: str) -> None:
        """Print a sentence of ours."""
        if not self._quiet:
            self._write("stderr", f"serverless-gpu: {sentence}\n")

    def finish(self) -> None:
        """Print lines that never got their newline."""
        for (rank, stream), text in self._partial.items():
            if text:
                self._write(stream, f"[rank {rank}] {text}\n")
        self._partial.clear()

    def failure(self, tails: Mapping[int, str]) -> None:
        """Print last lines, tagged like any others."""
        for rank, tail in tails.items():
            self.say(f"last output of rank {rank}:")
            self._write("stderr", "".join(f"[rank {rank}] {line}\n" for line in tail.split("\n")))

    def receipt(self, receipt: Receipt) -> None:
        """Print the receipt."""
        for line in receipt.text().splitlines():
            self.say(line)

    def _write(self, stream: str, text: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe nobody reads: the run matters more
            if target is not None:
                target.write(text)
                target.flush()


def make_display(*, quiet: bool, logs: Path) -> Display:
    """Return the display that suits this process: a notebook's in an IPython kernel, else a terminal's.

    Args:
        quiet: show nothing of our own.
        logs: where the whole output of the ranks is.
    """
    if _in_kernel() and importlib.util.find_spec(_NOTEBOOK) is not None:
        # By name: it imports from here, and IPython's display machinery is heavy.
        module = importlib.import_module(_NOTEBOOK)
        return cast("Display", module.NotebookDisplay(quiet=quiet, logs=logs))
    return TerminalDisplay(quiet=quiet, logs=logs)


def _in_kernel() -> bool:
    """Return whether this process is an IPython kernel; a plain IPython in a terminal is a terminal."""
    package = sys.modules.get("IPython")
    get_ipython = getattr(package, "get_ipython", None)
    return get_ipython is not None and hasattr(get_ipython(), "kernel")
