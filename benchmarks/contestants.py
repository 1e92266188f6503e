"""Processes that do one round when told, and rounds of several of them interleaved.

Every contestant lives in a process of its own, so that none inherits the threads, allocations or imports of another.
One line of JSON goes in, one comes out, on descriptors of their own: what libraries print goes to the log.

Failure cases: a contestant cannot start (a package is missing), raises, or takes too long: its row says so, and goes on
without it after the third time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROUND_S_MAX = 60.0
FAILURES_MAX = 3
PAUSE_S = 0.5
"""Between two rounds: a supervisor and ranks stand by again, and nobody pays for another's tidying up."""

_CLOSED_S = 60.0  # who keeps a pool of two machines ends that first

# Bytecode is kept, as it is in an installed package; variables that would change how torch starts are not.
_DROPPED = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "SERVERLESS_GPU_FAKE", "SERVERLESS_GPU_PREWARM")

Sample = dict[str, float]


class ContestantFailed(Exception):
    """A contestant could not do a round."""


class Contestant:
    """One process that does rounds.

    Args:
        name: of the function in `ours` or `neighbours`, as `module.function`.
        directory: scratch space; its log lies there.
        home: the home directory for our own runs.
        round_s_max: how long a round may take.
        python: the interpreter it runs in; "" for this one.
    """

    def __init__(
        self, name: str, directory: Path, home: Path, *, round_s_max: float = ROUND_S_MAX, python: str = ""
    ) -> None:
        self.name = name
        self._round_s_max = round_s_max
        self.samples: list[Sample] = []
        self.failures: list[str] = []
        self.notes: list[str] = []
        request_read, self._requests = os.pipe()
        self._replies, reply_write = os.pipe()
        self._log = directory / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [python or sys.executable, "-m", "benchmarks.drive", name, str(request_read), str(reply_write)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment(), "SERVERLESS_GPU_HOME": str(home)},
                pass_fds=(request_read, reply_write),
                start_new_session=True,
            )
        os.close(request_read)
        os.close(reply_write)
        self._lines = os.fdopen(self._replies, "rb", buffering=0)

    def round(self, **arguments: object) -> Sample:
        """Do one round and return its times in milliseconds.

        Raises:
            ContestantFailed: it ended, raised, or took too long.
        """
        try:
            os.write(self._requests, json.dumps(arguments).encode() + b"\n")
        except BrokenPipeError:
            raise ContestantFailed(self._last_words()) from None
        if not select.select([self._lines], [], [], self._round_s_max)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise ContestantFailed(f"no round within {self._round_s_max:.0f} s")
        line = self._lines.readline()
        if not line:
            raise ContestantFailed(self._last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise ContestantFailed(str(reply["error"]))
        if "note" in reply:
            self.notes.append(str(reply.pop("note")))
        return {str(key): float(value) for key, value in reply.items()}

    @property
    def out(self) -> bool:
        """Return whether it failed too often to go on."""
        return len(self.failures) >= FAILURES_MAX

    def problems(self) -> tuple[str, ...]:
        """Return what a reader must know about its rounds, each sentence once with its count."""
        told = [f"{self.name} failed: {failure}" for failure in self.failures]
        told += [f"{self.name}: {note}" for note in self.notes]
        return tuple(f"{count} × {text}" for text, count in Counter(told).items())

    def close(self) -> None:
        """End the process and what it started in its session."""
        os.close(self._requests)
        self._lines.close()
        try:
            self._process.wait(_CLOSED_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it ended without a word"


def environment() -> dict[str, str]:
    """Return the environment of every measured process."""
    return {name: value for name, value in os.environ.items() if name not in _DROPPED}


def interleave(
    contestants: Sequence[Contestant], rounds: int, *, slow: Sequence[str] = (), pause_s: float = PAUSE_S
) -> None:
    """Let contestants take turns: A B C A B C ...; the first turn of each is thrown away.

    Args:
        contestants: who takes part; samples are kept in each.
        rounds: number of turns that count.
        slow: names of those that take seconds, which have every third turn only.
        pause_s: quiet time after each turn.
    """
    for number in range(-1, rounds):
        for contestant in contestants:
            if contestant.out or (contestant.name in slow and number > 0 and number % 3):
                continue
            try:
                sample = contestant.round()
            except ContestantFailed as failure:
                contestant.failures.append(str(failure))
                continue
            if number >= 0:
                contestant.samples.append(sample)
            else:
                contestant.notes.clear()
            time.sleep(pause_s)


def wait_for_quiet(limit_s: float = 30.0) -> bool:
    """Wait until the machine has nothing else to do, up to a limit; return whether it has."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before = _busy_and_total()
        time.sleep(1.0)
        after = _busy_and_total()
        if after[0] - before[0] < 0.10 * (after[1] - before[1]):
            return True
    return False


def _busy_and_total() -> tuple[int, int]:
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
