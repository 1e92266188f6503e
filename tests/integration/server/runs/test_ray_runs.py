"""A run with a Ray cluster at a server: one process of the user's on each node, however many devices it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.spec import RayCluster
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, File, LogPiece, Report
from tests.support.golden import golden
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place, stored

pytestmark = pytest.mark.any_database

COMPLETED = Ending(state=State.SUCCEEDED, reason=Reason.COMPLETED, began=True, stopped=msgspec.Raw(b"{}"))
RESULT = File(name="results/0.pkl", size=2, inline=b"r0")


@pytest.fixture
def services(database: Database, tmp_path: Path) -> Services:
    add_people(database, "alice")
    add_node(database)
    (tmp_path / "server").mkdir()
    return made_services(database, tmp_path, clock=FakeClock(wall_ns=T0 + S))


@pytest.fixture
def run_id(services: Services, database: Database) -> str:
    """Return a run of a Ray driver that has eight devices of a node."""
    run_id = add_run(database, ray=RayCluster())
    place(database, run_id, world_size=8)
    return run_id


def say(services: Services, run_id: str, state: State, **said: Any) -> None:
    who = Caller(kind="attempt", attempt=(run_id, 1, 0))
    services.reports.receive(who, run_id=run_id, fence=1, said=Report(state=state, **said))


def test_it_has_completed_with_the_result_of_its_driver(services: Services, database: Database, run_id: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("server.ray_runs.results-here"))):
        say(services, run_id, State.STOPPING, exec_ns=T0, ending=COMPLETED)
    assert stored(database, run_id).state is State.STARTING
    say(services, run_id, State.STOPPING, exec_ns=T0, files=(RESULT,), ending=COMPLETED)
    assert stored(database, run_id).state is State.SUCCEEDED


def test_only_the_driver_has_output(services: Services, run_id: str) -> None:
    piece = LogPiece(rank=1, stream="stdout", offset=0, data=b"a worker's")
    with pytest.raises(InvalidValue, match=re.escape(golden("server.ray_runs.rank"))):
        say(services, run_id, State.RUNNING, logs=(piece,))
