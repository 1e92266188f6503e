"""Helpers of the tests of backups that other tests use as well."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.server.core.settings import read_settings
from serverless_gpu.server.operations.backup import FinishedBackup, back_up
from serverless_gpu.wire.agents import LogPiece, Report, Start
from tests.support.server.played import Played
from tests.support.server.runs_api import submit
from tests.support.server.served import Served

S = 1_000_000_000


class Later(SystemClock):
    """A clock that a test moves on: backups are named after their second."""

    ahead_ns = 0

    def wall_ns(self) -> int:
        return super().wall_ns() + self.ahead_ns


CLOCK = Later()


def backup_of(home: Path, directory: Path) -> FinishedBackup:
    """Return a backup of a home's server."""
    CLOCK.ahead_ns += S
    return back_up(read_settings(home), directory, clock=CLOCK)


def going_on(server: Served) -> tuple[Played, Start, str]:
    """Return a node that has started a run and reported a line of it."""
    node = Played(server)
    node.join()
    run = submit(server.connection())
    start = node.order()
    node.report(start, Report(state=State.RUNNING, world_size=1, exec_ns=5, logs=(line(0, b"before\n"),)))
    return node, start, run.id


def line(offset: int, data: bytes) -> LogPiece:
    return LogPiece(rank=0, stream="stdout", offset=offset, data=data)
