"""Helpers of the tests of reporting that other tests use as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Reason, State
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, File, LogPiece, Report, ReportAnswer
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place

CALM = ReportAnswer(partition_grace_s=900.0, heartbeat_s=5.0)
RESULTS = (File(name="results/0.pkl", size=2, inline=b"r0"), File(name="results/1.pkl", size=2, inline=b"r1"))
COMPLETED = Ending(state=State.SUCCEEDED, reason=Reason.COMPLETED, began=True, stopped=msgspec.Raw(b'{"a":1}'))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0 + S)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    add_people(database, "alice")
    add_node(database)
    (tmp_path / "server").mkdir()
    return made_services(database, tmp_path, clock=clock)


@pytest.fixture
def run_id(services: Services, database: Database) -> str:
    """Return a run with an attempt of two ranks."""
    run_id = add_run(database)
    place(database, run_id)
    return run_id


def say(services: Services, run_id: str, state: State = State.RUNNING, *, fence: int = 1, **said: Any) -> ReportAnswer:
    who = Caller(kind="attempt", attempt=(run_id, fence, 0))
    return services.reports.receive(who, run_id=run_id, fence=fence, said=Report(state=state, **said))


def piece(data: bytes, offset: int = 0, *, rank: int = 0) -> LogPiece:
    return LogPiece(rank=rank, stream="stdout", offset=offset, data=data)


def fact(run_id: str, seq: int, *, fence: int = 1, cpus: int = 0) -> Fact:
    return Fact(
        attempt=f"{run_id}:{fence}",
        seq=seq,
        kind=list(FactKind)[min(seq, len(FactKind) - 1)],
        boot_id="boot-1",
        boottime_ns=seq,
        wall_ns=T0 + seq,
        gpus=("GPU-0",),
        cpus=cpus,
        memory_bytes=0,
    )
