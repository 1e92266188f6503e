"""A gang whose crews were changed past the one place that folds them is made what they amount to, and that is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.run_lifecycle import Silent, StopAsked
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle.gang_reconciler import GangReconciler
from serverless_gpu.server.scheduling.reconciler import Reconciler
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.server.ganged import began, happened, place_met, say
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people, add_run, stored, tell


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


def tick(services: Services, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what a tick of the reconciler says of mended runs."""
    caplog.clear()
    with caplog.at_level(logging.ERROR, "serverless_gpu.server.lifecycle.gang_reconciler"):
        services.make(Reconciler, scheduler=make_scheduler(services)).tick(services.clock.boottime_ns())
    return [record.getMessage() for record in caplog.records]


HALT = msgspec.json.encode(Halt(reason=Reason.RANK_RAISED, rank=1, detail="no luck")).decode()
OVER = {"state": "SUCCEEDED", "reason": "completed", "ended_ns": T0 + 8 * S}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both have returned": ({"returned": True}, {"returned": True}),
    "one has said that it ends": ({}, {"halt_json": HALT}),
    "both have ended": (OVER, OVER),
    "one is silent": ({"state": "UNREACHABLE", "before": "RUNNING"}, {}),
    "one stops": ({}, {"state": "STOPPING"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_two_crews_amount_to_is_written_though_nobody_did(
    services: Services, database: Database, run_id: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    began(services, run_id)
    assert tick(services, caplog) == []
    for number, values in enumerate(CHANGES[what]):
        if values:
            change(database, number, **values)
    assert tick(services, caplog) == [golden("server.folding_again.run-crews-amount", run_id=run_id)]
    assert tick(services, caplog) == []
    run = stored(database, run_id)
    assert run.attempt is not None
    if what == "both have returned":
        assert (run.state, run.attempt.released) == (State.RUNNING, True)
        assert [number for _, _, number in (*services.looks.of("node-1"), *services.looks.of("node-2"))] == [0, 1]
    elif what == golden("server.folding_again.one-said-ends"):
        assert run.attempt.cause is not None and run.attempt.cause.detail == "no luck"
        assert say(services, run_id, 0).peer_failed == golden("server.folding_again.rank-n2-luck")
    else:
        wanted = {"both have ended": State.SUCCEEDED, "one is silent": State.UNREACHABLE, "one stops": State.STOPPING}
        assert run.state is wanted[what] and run.attempt.state is wanted[what]


def test_both_have_begun_and_the_run_has_not(
    services: Services, database: Database, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (0, 1):
        change(database, number, state="RUNNING", began=True, started_ns=T0 + 3 * S)
    assert len(tick(services, caplog)) == 1
    run = stored(database, run_id)
    assert run.attempt is not None
    assert (run.state, run.started_ns, run.attempt.began) == (State.RUNNING, T0 + 3 * S, True)


def test_what_is_on_its_way_is_left_alone(
    services: Services, database: Database, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever happens in order leaves nothing to be folded again."""
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
        assert tick(services, caplog) == []


def test_it_is_found_whichever_crews_go_on(services: Services, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tick looks at gangs of which a crew goes on; at all of them every minute."""
    looked: list[object] = []
    monkeypatch.setattr(GangReconciler, "reconcile", lambda _reconciler, ids=None: looked.append(ids))
    again = services.make(Reconciler, scheduler=make_scheduler(services))
    now_ns = services.clock.boottime_ns()
    for after_s in (0, 2, 62):
        again.tick(now_ns + after_s * S)
    assert looked == [[run_id], None, [run_id], [run_id], None]
