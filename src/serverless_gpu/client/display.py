"""What a person sees while a run goes on: rank lines, why it waits, the receipt.

What ranks write goes to the stream they wrote it to, each line tagged with its rank; what we say goes to stderr.
"""

from __future__ import annotations

import contextlib
import sys

from serverless_gpu.model.ledger import Receipt


class Display:
    """Prints one run.

    Args:
        quiet: print nothing of our own (rank output is still shown).
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._partial: dict[tuple[int, str], str] = {}

    def output(self, rank: int, stream: str, text: str) -> None:
        """Print the whole lines of what a rank wrote and keep the rest."""
        key = (rank, stream)
        *lines, self._partial[key] = (self._partial.get(key, "") + text).split("\n")
        if lines:
            self._write(stream, "".join(f"[rank {rank}] {line}\n" for line in lines))

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
