"""Progress lines of a part of the suite, while `make test` holds back the part's output until the part has ended.

    [remote] 37 % · 312 of 845 · tests/e2e/remote/test_calls.py · 1 failed · 4 min

`make test` names the part in TEST_PART and a descriptor in TEST_PROGRESS_FD, which leads past `--output-sync`. Lines
are at least TEST_PROGRESS_S seconds apart; a failure has its line at once. No thread writes them: tests fork.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, MutableMapping

import pytest

INTERVAL_S = 15.0


class Progress:
    """A pytest plugin that writes the lines of one part.

    Args:
        part: the part's name.
        write: takes each line.
        interval_s: how far two lines are apart, failures left out.
        now: returns seconds of a clock that does not jump.
    """

    def __init__(
        self,
        part: str,
        write: Callable[[str], None],
        interval_s: float = INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._part, self._write, self._interval_s, self._now = part, write, interval_s, now
        self._started_s = self._said_s = now()
        self._total = self._ended = 0
        self._failed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of this part."""
        self._total = len(session.items)
        self._say(f"{self._total} tests")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say where the part is, if it has been silent for the interval."""
        if self._now() - self._said_s >= self._interval_s:
            self._say(self._state(nodeid.partition("::")[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say at once that a test failed."""
        if report.failed and report.nodeid not in self._failed:
            self._failed.add(report.nodeid)
            self._say(f"FAILED {report.nodeid}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count a test that ended."""
        self._ended += 1
        self.pytest_runtest_logstart(nodeid)

    def pytest_sessionfinish(self) -> None:
        """Say that the part has ended."""
        self._say(self._state("ended, its output follows"))

    def _state(self, place: str) -> str:
        percent = 100 * self._ended // max(1, self._total)
        failed = f" · {len(self._failed)} failed" if self._failed else ""
        minutes = (self._now() - self._started_s) / 60
        return f"{percent} % · {self._ended} of {self._total} · {place}{failed} · {minutes:.0f} min"

    def _say(self, text: str) -> None:
        self._said_s = self._now()
        self._write(f"[{self._part}] {text}\n")


def from_variables(environ: MutableMapping[str, str]) -> Progress | None:
    """Return the plugin that `make test` asks for, or None; processes of tests get neither descriptor nor variables."""
    descriptor, part = environ.pop("TEST_PROGRESS_FD", ""), environ.pop("TEST_PART", "")
    interval_s = float(environ.pop("TEST_PROGRESS_S", INTERVAL_S))
    if not descriptor.isdigit():
        return None
    fd = int(descriptor)
    try:
        os.set_inheritable(fd, False)
    except OSError:  # the variable was passed on without the descriptor
        return None

    def write(line: str) -> None:
        with contextlib.suppress(OSError):  # a terminal or pipe that is gone ends no tests
            os.write(fd, line.encode("utf-8", "replace"))

    return Progress(part or "tests", write, interval_s)
