"""A gang that goes on is what its crews amount to, after each step; rows that say otherwise are a violation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.run_lifecycle import Silent, StopAsked
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import invariant_inputs
from serverless_gpu.server.invariants.run_invariants import gangs
from serverless_gpu.testing import FakeClock
from tests.support.server.ganged import began, happened, place_met, say
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people, add_run, tell


@pytest.fixture
def services(database: Database, tmp_path: Path) -> Services:
    add_people(database, "alice")
    add_node(database)
    add_node(database, "node-2", name="n2")
    (tmp_path / "server").mkdir()
    return made_services(database, tmp_path, clock=FakeClock(wall_ns=T0 + 9 * S))


@pytest.fixture
def run_id(services: Services, database: Database) -> str:
    """Return a run with a crew on n1 and one on n2."""
    run_id = add_run(database)
    place_met(database, run_id, 1, 1)
    return run_id


def change(database: Database, number: int, **values: Any) -> None:
    """Change a crew past everything that folds."""
    one = tables.crews.update().where(tables.crews.c.crew == number).values(**values)
    database.write(lambda connection: connection.execute(one))


def is_violated(database: Database, run_id: str) -> bool:
    """Return whether the run is not what its crews amount to."""
    (recorded,) = database.read(lambda connection: invariant_inputs.of_runs(connection, [run_id])).runs
    return any("does not follow from the states on its nodes" in violation.sentence for violation in gangs(recorded))


HALT = msgspec.json.encode(Halt(reason=Reason.RANK_RAISED, rank=1, detail="no luck")).decode()
OVER = {"state": "SUCCEEDED", "reason": "completed", "ended_ns": T0 + 8 * S}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both have returned": ({"returned": True}, {"returned": True}),
    "one ends": ({}, {"halt_json": HALT}),
    "both have ended": (OVER, OVER),
    "one is silent": ({"state": "UNREACHABLE", "before": "RUNNING"}, {}),
    "one stops": ({}, {"state": "STOPPING"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_crews_that_are_changed_past_their_run_are_a_violation(
    services: Services, database: Database, run_id: str, what: str
) -> None:
    began(services, run_id)
    assert not is_violated(database, run_id)
    for number, values in enumerate(CHANGES[what]):
        if values:
            change(database, number, **values)
    assert is_violated(database, run_id)


def test_crews_that_have_begun_in_a_run_that_has_not_are_a_violation(database: Database, run_id: str) -> None:
    for number in (0, 1):
        change(database, number, state="RUNNING", began=True, started_ns=T0 + 3 * S)
    assert is_violated(database, run_id)


def test_a_gang_is_what_its_crews_amount_to_after_each_step(
    services: Services, database: Database, run_id: str
) -> None:
    steps: list[Any] = [
        lambda: say(services, run_id, 1, exec_ns=T0 + 3 * S),
        lambda: happened(database, run_id, 1, Silent()),
        lambda: say(services, run_id, 0, exec_ns=T0 + 3 * S),
        lambda: say(services, run_id, 1, exec_ns=T0 + 3 * S),
        lambda: say(services, run_id, 1, returned=True),
        lambda: tell(database, run_id, StopAsked(StopReason.PREEMPT)),
        lambda: say(services, run_id, 0, returned=True),
        lambda: happened(database, run_id, 0, Silent()),
        lambda: say(services, run_id, 1, State.STOPPING, halt=Halt(reason=Reason.RANK_SIGNAL, rank=1)),
        lambda: say(services, run_id, 0, State.STOPPING),
    ]
    for step in steps:
        step()
        assert not is_violated(database, run_id)
