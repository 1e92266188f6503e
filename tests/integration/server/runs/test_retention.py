"""Runs that ended long ago go whole; nothing of any other run is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Reason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, UserCodeStarted
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.records import audit, facts, files, runs
from serverless_gpu.server.records.files import StoredFile
from serverless_gpu.server.runs import retention
from serverless_gpu.server.runs.retention import EVERY_S, FIRST_S, Retention
from serverless_gpu.testing import FakeClock
from tests.support.server.charged import charge_all
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place, rows, stored, tell

DAY_S = 86_400
RUN_TABLES = (tables.runs, tables.attempts, tables.crews, tables.events, tables.files, tables.facts, tables.orders)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    add_people(database, "alice")
    add_node(database)
    return made_services(database, tmp_path, clock=clock, retention_s=30.0 * DAY_S, logs_bytes_max=1_000)


@pytest.fixture
def looking(services: Services, clock: FakeClock) -> Retention:
    """Return a retention whose first look is due."""
    made = services.make(Retention)
    clock.advance(FIRST_S)
    return made


def add_ended(
    services: Services, database: Database, *, days_ago: float, output: int = 10, settled: bool = True
) -> str:
    """Write a run that ended; it has rows in every table, and output of so many bytes."""
    at_ns = services.clock.wall_ns() - round(days_ago * DAY_S * S)
    run_id = add_run(database, at_ns=at_ns - S)
    fence = place(database, run_id, at_ns=at_ns)
    fact = Fact(
        attempt=f"{run_id}:{fence}",
        seq=1,
        kind=FactKind.FREED,
        boot_id="boot-1",
        boottime_ns=1,
        wall_ns=at_ns,
        gpus=("GPU-0",),
        cpus=0,
        memory_bytes=0,
    )

    def leave(connection: object) -> None:
        files.put(connection, run_id, fence, [StoredFile(name="results/0.pkl", size=1, inline=b"x")])  # type: ignore[arg-type]  # a connection
        facts.add(connection, (run_id, fence, 0), [fact])  # type: ignore[arg-type]  # as above

    database.write(leave)
    services.logs.append(run_id, fence, rank=0, stream="stdout", offset=0, data=b"x" * output)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.COMPLETED, began=True), at_ns=at_ns)
    if settled:
        database.write(lambda connection: transitions.settle(connection, (run_id, fence, 0), receipt="{}", at_ns=at_ns))
        charge_all(services)
    return run_id


def left(database: Database) -> set[str]:
    """Return the runs of which there is a row anywhere."""
    return {row["id" if table is tables.runs else "run_id"] for table in RUN_TABLES for row in rows(database, table)}


def test_a_run_that_ended_long_ago_goes_whole_and_the_audit_says_so(
    looking: Retention, services: Services, database: Database, clock: FakeClock
) -> None:
    old = add_ended(services, database, days_ago=31)
    young = add_ended(services, database, days_ago=29)
    assert looking.tick(clock.boottime_ns()) == clock.boottime_ns() + round(EVERY_S * 1e9)
    assert left(database) == {young}
    assert services.logs.run_sizes() == {young: 10}
    assert len(rows(database, tables.files)) == len(rows(database, tables.facts)) == 1
    (entry,) = database.read(audit.entries)
    assert (entry.principal, entry.action, entry.subject) == ("server", "run.expire", old)
    assert entry.detail["owner"] == "alice" and entry.detail["state"] == "SUCCEEDED"


def test_what_waits_runs_or_is_not_settled_stays_however_old_it_is(
    looking: Retention, services: Services, database: Database, clock: FakeClock
) -> None:
    waits = add_run(database, at_ns=T0 - 900 * DAY_S * S)
    runs_on = add_run(database, at_ns=T0 - 900 * DAY_S * S)
    place(database, runs_on, at_ns=T0 - 900 * DAY_S * S)
    unsettled = add_ended(services, database, days_ago=900, settled=False)
    looking.tick(clock.boottime_ns())
    assert left(database) == {waits, runs_on, unsettled}
    assert database.read(lambda connection: runs.endings(connection, [waits, runs_on, unsettled, "none"])) == {
        waits: None,
        runs_on: None,
        unsettled: None,
    }


def test_a_run_with_an_earlier_attempt_that_is_not_settled_stays(
    looking: Retention, services: Services, database: Database, clock: FakeClock
) -> None:
    run_id = add_run(database, at_ns=T0 - 900 * DAY_S * S, retries=1)
    place(database, run_id, at_ns=T0 - 900 * DAY_S * S)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.RANK_RAISED, began=True), at_ns=T0 - 900 * DAY_S * S)
    fence = place(database, run_id, at_ns=T0 - 900 * DAY_S * S)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.COMPLETED, began=True), at_ns=T0 - 900 * DAY_S * S)
    database.write(lambda connection: transitions.settle(connection, (run_id, fence, 0), receipt="{}", at_ns=T0))
    looking.tick(clock.boottime_ns())
    assert left(database) == {run_id}
    database.write(lambda connection: transitions.settle(connection, (run_id, 1, 0), receipt="{}", at_ns=T0))
    charge_all(services)
    clock.advance(EVERY_S)
    looking.tick(clock.boottime_ns())
    assert left(database) == set()


def test_a_tick_does_so_much_and_the_next_one_goes_on(
    looking: Retention, services: Services, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 2)
    first, second, third = (add_ended(services, database, days_ago=days) for days in (50, 40, 35))
    assert looking.tick(clock.boottime_ns()) == clock.boottime_ns()
    assert left(database) == {third}, (first, second)
    assert looking.tick(clock.boottime_ns()) == clock.boottime_ns() + round(EVERY_S * 1e9)
    assert left(database) == set()


def test_nothing_is_removed_before_it_is_time(services: Services, database: Database, clock: FakeClock) -> None:
    made = services.make(Retention)
    run_id = add_ended(services, database, days_ago=31)
    due_ns = made.tick(clock.boottime_ns())
    assert due_ns == clock.boottime_ns() + round(FIRST_S * 1e9)
    assert left(database) == {run_id}


def test_the_oldest_output_goes_when_all_of_it_is_too_much_and_the_run_stays(
    looking: Retention, services: Services, database: Database, clock: FakeClock
) -> None:
    oldest = add_ended(services, database, days_ago=3, output=600)
    older = add_ended(services, database, days_ago=2, output=600)
    fresh = add_ended(services, database, days_ago=0, output=5_000)
    going_on = add_run(database)
    fence = place(database, going_on)
    services.logs.append(going_on, fence, rank=0, stream="stdout", offset=0, data=b"x" * 9_000)
    looking.tick(clock.boottime_ns())
    assert services.logs.run_sizes() == {fresh: 5_000, going_on: 9_000}
    assert left(database) == {oldest, older, fresh, going_on}
    assert stored(database, oldest).finished
    noted = database.read(audit.entries)
    assert [(entry.action, entry.subject, entry.detail) for entry in noted] == [
        ("run.logs.expire", oldest, {"bytes": 600}),
        ("run.logs.expire", older, {"bytes": 600}),
    ]


def test_output_without_a_run_goes(
    looking: Retention, services: Services, database: Database, clock: FakeClock
) -> None:
    killed_here = add_ended(services, database, days_ago=31)
    looking.tick(clock.boottime_ns())
    services.logs.append(killed_here, 1, rank=0, stream="stdout", offset=0, data=b"late")
    clock.advance(EVERY_S)
    looking.tick(clock.boottime_ns())
    assert services.logs.run_sizes() == {}


def test_22B10_output_of_a_run_that_the_database_lost_stays(
    looking: Retention, services: Services, clock: FakeClock
) -> None:
    """It is the only copy, and says that something was lost."""
    lost = "01kaz5w8000000000000000000"
    services.logs.append(lost, 1, rank=0, stream="stdout", offset=0, data=b"seen")
    clock.advance(EVERY_S)
    looking.tick(clock.boottime_ns())
    assert services.logs.run_sizes() == {lost: 4}


def test_a_clock_that_is_set_forward_removes_nothing_for_an_hour(
    services: Services, database: Database, clock: FakeClock, looking: Retention
) -> None:
    run_id = add_ended(services, database, days_ago=1)
    assert looking.tick(clock.boottime_ns()) is not None
    clock.step_wall(31 * DAY_S)
    clock.advance(EVERY_S)
    due_ns = looking.tick(clock.boottime_ns())
    assert left(database) == {run_id} and due_ns == clock.boottime_ns() + round(FIRST_S * 1e9)
    clock.step_wall(-31 * DAY_S)  # somebody set it right
    clock.advance(FIRST_S)
    looking.tick(clock.boottime_ns())
    assert left(database) == {run_id}
    clock.step_wall(31 * DAY_S)  # it really is that late
    looking.tick(clock.boottime_ns())
    clock.advance(FIRST_S)
    looking.tick(clock.boottime_ns())
    assert left(database) == set()
