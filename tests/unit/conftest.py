"""Unit tests start no process, open no socket and use no database but SQLite in memory.

So they are fast, and safe beside each other in several workers (`make test-quick`). A test that needs more stands in
`tests/integration` under the same package path.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator

import pytest

_REFUSED = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "socket.bind",
    "socket.connect",
    "subprocess.Popen",
}


class NotAUnit(AssertionError):
    """A unit test started a process, opened a socket or opened a database on disk."""


class _Guard:
    """An audit hook, which Python keeps until the process ends; it acts while a unit test runs."""

    def __init__(self) -> None:
        self.is_active = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_active and (event in _REFUSED or (event == "sqlite3.connect" and ":memory:" not in str(arguments))):
            raise NotAUnit(f"{event}{arguments!r}: move this test to tests/integration")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in captured output: pytest-xdist cannot send them from a worker."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


_GUARD = _Guard()
sys.addaudithook(_GUARD)


@pytest.fixture(autouse=True)
def no_processes_sockets_or_databases() -> Iterator[None]:
    """Refuse what makes a test slow or disturbs others."""
    _GUARD.is_active = True
    try:
        yield
    finally:
        _GUARD.is_active = False
