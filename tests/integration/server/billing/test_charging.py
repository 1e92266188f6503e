"""What attempts used becomes entries of the ledger: once, whatever comes late, twice, or while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.ledger import EntryKind, LedgerEntry, lines, post
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.lifecycle.attempt import FactKind, Reason
from serverless_gpu.model.lifecycle.run_lifecycle import GivenUp
from serverless_gpu.server.billing import charging
from serverless_gpu.server.billing.charging import Charging
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants.self_check import check
from serverless_gpu.server.lifecycle import metering
from serverless_gpu.server.records import attempts, charges, facts
from serverless_gpu.server.records.charges import Account
from serverless_gpu.server.runs.retention import EVERY_S, Retention
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.server.charged import charge_all
from tests.support.server.charging import HOUR_S, MIDNIGHT, TARIFF, begun, end, fact, late, used, write_facts
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place, rows, tell


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    add_people(database, "alice")
    add_node(database)
    return made_services(database, tmp_path, clock=clock)


def entries(database: Database, run_id: str) -> list[LedgerEntry]:
    posted = database.read(lambda connection: charges.of_run(connection, run_id)).get((1, 0), [])
    return [one.entry for one in posted]


def net(database: Database, run_id: str, name: str) -> int:
    """Return what the rows of a run add up to."""
    column = tables.charges.c[name]
    query = sa.select(sa.func.sum(column)).where(tables.charges.c.run_id == run_id)
    return int(database.read(lambda connection: connection.scalar(query)) or 0)


def shape(database: Database, run_id: str) -> list[tuple[str, bool, int | None]]:
    return [(entry.kind.value, entry.provisional, entry.line.micros) for entry in entries(database, run_id)]


def test_an_attempt_is_charged_once_when_it_is_settled(services: Services, database: Database) -> None:
    run_id = begun(database)
    write_facts(database, run_id, used(run_id, seconds=HOUR_S))
    charge_all(services)
    assert entries(database, run_id) == []  # more is awaited
    end(database, run_id, at_ns=T0 + HOUR_S * S)
    charge_all(services)
    assert shape(database, run_id) == [("original", False, 7_200_000)]
    (line,) = (entry.line for entry in entries(database, run_id))
    assert (line.gpu_ms, line.billed_ms, line.gpus) == (7_200_000, 7_200_000, 2)
    assert net(database, run_id, "queued_ms") == 2_000
    database.write(lambda connection: charges.charge_again(connection, run_id))
    charge_all(services)
    assert len(entries(database, run_id)) == 1
    assert [row["uncharged"] for row in rows(database, tables.crews)] == [False]


def test_an_attempt_whose_node_fell_silent_is_charged_provisionally_and_then_as_it_was(
    services: Services, database: Database
) -> None:
    run_id = begun(database)
    said = used(run_id, seconds=600, until=FactKind.ALIVE)
    write_facts(database, run_id, said)
    tell(database, run_id, GivenUp(reason=Reason.NODE_GONE), at_ns=T0 + HOUR_S * S)
    charge_all(services)
    # Nobody pays where the platform failed; that it was used is known.
    assert shape(database, run_id) == [("original", True, 0)]
    assert net(database, run_id, "gpu_ms") == 1_200_000
    late(services, run_id, [fact(run_id, 3, FactKind.ALIVE, T0 + 700 * S)])
    charge_all(services)
    assert [entry.kind for entry in entries(database, run_id)] == ["original", "reversal", "restated"]
    assert net(database, run_id, "gpu_ms") == 1_400_000
    late(services, run_id, [fact(run_id, 4, FactKind.FREED, T0 + 800 * S)])
    charge_all(services)
    own = entries(database, run_id)
    assert [entry.provisional for entry in own] == [True, True, True, True, False]
    provisional = [entry.line.gpu_ms for entry in own if entry.provisional]
    assert sum(provisional) == 0
    assert net(database, run_id, "gpu_ms") == 1_600_000
    assert net(database, run_id, "queued_ms") == 2_000


def test_what_is_provisional_is_made_final_before_its_run_is_removed(
    services: Services, database: Database, clock: FakeClock
) -> None:
    run_id = begun(database)
    write_facts(database, run_id, used(run_id, seconds=600, until=FactKind.ALIVE))
    tell(database, run_id, GivenUp(reason=Reason.NODE_GONE), at_ns=T0 + HOUR_S * S)
    charge_all(services)
    services.logs.append(run_id, 1, rank=0, stream="stdout", offset=0, data=b"said")
    looking = services.make(Retention)
    clock.advance(services.settings.retention_s + 2 * HOUR_S)
    looking.tick(clock.boottime_ns())
    assert len(rows(database, tables.runs)) == 1 and services.logs.run_sizes() == {run_id: 4}
    charge_all(services)
    assert [entry.provisional for entry in entries(database, run_id)] == [True, True, False]
    clock.advance(EVERY_S)
    looking.tick(clock.boottime_ns())
    assert rows(database, tables.runs) == rows(database, tables.attempts) == rows(database, tables.crews) == []
    assert net(database, run_id, "gpu_ms") == 1_200_000 and services.logs.run_sizes() == {}


def test_days_that_are_over_are_charged_while_the_attempt_goes_on(
    services: Services, database: Database, clock: FakeClock
) -> None:
    clock.advance((MIDNIGHT - 600 * S - T0) / S)
    run_id = begun(database, at_ns=MIDNIGHT - 600 * S)
    loop = services.make(Charging)
    write_facts(database, run_id, used(run_id, seconds=599, at_ns=MIDNIGHT - 600 * S, until=FactKind.ALIVE))
    charge_all(services, loop)
    clock.advance(660)
    charge_all(services, loop)
    assert entries(database, run_id) == []  # nobody knows whether it still went on at midnight
    write_facts(database, run_id, [fact(run_id, 3, FactKind.ALIVE, MIDNIGHT + 59 * S)])
    clock.advance(charging.TURN_S)
    charge_all(services, loop)
    assert shape(database, run_id) == [("original", False, 1_200_000)]
    write_facts(database, run_id, [fact(run_id, 4, FactKind.FREED, MIDNIGHT + 100 * S)])
    end(database, run_id, at_ns=MIDNIGHT + 100 * S)
    charge_all(services, loop)
    assert shape(database, run_id) == [("original", False, 1_200_000), ("original", False, 200_000)]
    assert [entry.line.day for entry in entries(database, run_id)] == [MIDNIGHT // DAY_NS - 1, MIDNIGHT // DAY_NS]
    assert net(database, run_id, "queued_ms") == 2_000


def test_a_loop_that_starts_after_the_turn_of_a_day_charges_it_too(
    services: Services, database: Database, clock: FakeClock
) -> None:
    clock.advance((MIDNIGHT + 900 * S - T0) / S)
    run_id = begun(database, at_ns=MIDNIGHT - 600 * S)
    write_facts(database, run_id, used(run_id, seconds=900, at_ns=MIDNIGHT - 600 * S, until=FactKind.ALIVE))
    charge_all(services)
    charge_all(services)
    assert shape(database, run_id) == [("original", False, 1_200_000)]


def test_a_platform_failure_takes_back_what_was_charged_of_days_before(
    services: Services, database: Database, clock: FakeClock
) -> None:
    clock.advance((MIDNIGHT + 900 * S - T0) / S)
    run_id = begun(database, at_ns=MIDNIGHT - 600 * S)
    write_facts(database, run_id, used(run_id, seconds=900, at_ns=MIDNIGHT - 600 * S))
    charge_all(services)
    end(database, run_id, Reason.GPU_LOST, at_ns=MIDNIGHT + 900 * S)
    charge_all(services)
    assert net(database, run_id, "micros") == 0
    assert net(database, run_id, "gpu_ms") == 1_800_000
    assert net(database, run_id, "queued_ms") == 2_000


def test_a_node_with_a_wrong_clock_moves_no_use_to_another_day(services: Services, database: Database) -> None:
    run_id = begun(database)
    wrong = [msgspec.structs.replace(one, wall_ns=one.wall_ns - T0) for one in used(run_id, seconds=60)]
    write_facts(database, run_id, wrong)
    end(database, run_id, at_ns=T0 + 60 * S)
    charge_all(services)
    (entry,) = entries(database, run_id)
    assert (entry.line.day, entry.line.start_ns) == (T0 // DAY_NS, T0)


def test_use_before_user_code_begins_is_never_older_than_its_attempt(services: Services, database: Database) -> None:
    run_id = add_run(database, at_ns=T0)
    place(database, run_id, at_ns=T0)
    reserved = [
        fact(run_id, 0, FactKind.RESERVED, T0 - 400 * DAY_NS),
        fact(run_id, 1, FactKind.FREED, T0 - 399 * DAY_NS),
    ]
    write_facts(database, run_id, reserved)
    attempt = database.read(lambda connection: attempts.find(connection, run_id, 1))
    assert attempt is not None
    assert metering.on_our_calendar(attempt, attempt.crews[0], reserved)[0].wall_ns == T0


def test_an_attempt_that_cannot_be_charged_does_not_hinder_the_others(
    services: Services, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    worse, well = begun(database, at_ns=T0), begun(database, at_ns=T0)
    write_facts(database, worse, used(worse, seconds=500 * 86_400))
    write_facts(database, well, used(well, seconds=60))
    for run_id in (worse, well):
        end(database, run_id, at_ns=T0 + 60 * S)
    charge_all(services)
    assert shape(database, well) == [("original", False, 120_000)]
    assert entries(database, worse) == []
    assert "could not charge attempt" in caplog.text
    assert services.measures.registry.get_sample_value("sgpu_charge_failures_total") == 1


def test_where_more_cannot_be_charged_than_are_left_aside_it_is_not_tried_without_a_pause(
    services: Services, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charging, "ASIDE_MAX", 1)
    loop, now_ns = services.make(Charging), services.clock.boottime_ns()
    for run_id in (begun(database), begun(database)):
        write_facts(database, run_id, used(run_id, seconds=500 * 86_400))
        end(database, run_id, at_ns=T0 + 60 * S)
    assert [loop.tick(now_ns) for _ in range(3)] == [now_ns + round(charging.EVERY_S * 1e9)] * 3


def test_a_node_that_counts_more_time_than_there_was_is_said(
    services: Services, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = begun(database)
    write_facts(database, run_id, used(run_id, seconds=HOUR_S))
    end(database, run_id, at_ns=T0 + 60 * S)
    charge_all(services)
    assert golden("server.charging.placed-ago-said") in caplog.text
    assert shape(database, run_id) == [("original", False, 7_200_000)]


def test_facts_that_come_while_an_attempt_is_charged_are_charged(
    services: Services, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL both go on at once, and the one that is later is done again."""
    run_id = begun(database)
    write_facts(database, run_id, used(run_id, seconds=60, until=FactKind.ALIVE))
    end(database, run_id, at_ns=T0 + 60 * S)
    account_id = _account(database)
    database.write(lambda connection: attempts.note(connection, run_id, 1, account_id=account_id))
    insert, crossed = charges.insert, [database.kind == "sqlite"]

    def crossing(connection: sa.Connection, new: Sequence[charges.NewEntry], *, at_ns: int) -> int:
        if not crossed[0]:  # its facts were read, and nothing is written
            crossed[0] = True
            with ThreadPoolExecutor(1) as pool:
                pool.submit(late, services, run_id, [fact(run_id, 3, FactKind.FREED, T0 + 90 * S)]).result()
        return insert(connection, new, at_ns=at_ns)

    monkeypatch.setattr(charges, "insert", crossing)
    charge_all(services)
    if database.kind == "sqlite":  # its one writer does one after the other
        late(services, run_id, [fact(run_id, 3, FactKind.FREED, T0 + 90 * S)])
        charge_all(services)
    assert net(database, run_id, "gpu_ms") == 180_000
    assert [row["uncharged"] for row in rows(database, tables.crews)] == [False]
    assert [one for one in check(database.read).violations if one.invariant == "I7"] == []


def test_facts_that_no_attempt_can_have_are_refused(services: Services, database: Database) -> None:
    run_id = begun(database)
    impossible: list[dict[str, Any]] = [
        {"boottime_ns": 1 << 70},
        {"wall_ns": -1},
        {"memory_bytes": 1 << 63},
        {"gpus": ("a", "b", "c")},
    ]
    for seq, changed in enumerate(impossible, start=1):
        bad = msgspec.structs.replace(fact(run_id, seq, FactKind.ALIVE, T0), **changed)
        with pytest.raises(InvalidValue):
            late(services, run_id, [bad])


def test_everything_of_an_attempt_is_in_its_account(services: Services, database: Database) -> None:
    run_id = begun(database, name="train", tags={"team": "a"}, policy="p", team="llm")
    write_facts(database, run_id, used(run_id, seconds=60))
    end(database, run_id, at_ns=T0 + 60 * S)
    charge_all(services)
    (posted,) = database.read(lambda connection: charges.after(connection, 0, limit=10))
    found = database.read(lambda connection: charges.find_accounts(connection, [posted.account_id]))
    assert found[posted.account_id] == Account(
        owner="alice",
        gpu_type="H100",
        team="llm",
        pool="default",
        policy="p",
        name="train",
        tags={"team": "a"},
    )
    again = database.write(lambda connection: charges.ensure_account(connection, found[posted.account_id]))
    assert again == posted.account_id


def test_what_telemetry_saw_is_kept(services: Services, database: Database) -> None:
    run_id = begun(database)
    write_facts(database, run_id, used(run_id, seconds=60))
    uses = [
        {"uuid": "GPU-0", "samples": 60, "busy_percent": 50.0, "peak_memory_bytes": 7},
        {"uuid": "GPU-1", "samples": 0},
    ]
    end(database, run_id, at_ns=T0 + 60 * S, receipt=msgspec.json.encode({"uses": uses, "facts": 3}).decode())
    charge_all(services)
    (row,) = rows(database, tables.utilisations)
    assert (row["gpu_ms"], row["observed_ms"], row["busy_ms"], row["peak_memory_bytes"]) == (120_000, 60_000, 30_000, 7)


@pytest.mark.parametrize(
    "use",
    [
        {"samples": 100, "busy_percent": 1e308},
        {"samples": 100, "busy_percent": -1e19},
        {"samples": 1 << 63, "busy_percent": 50.0},
        {"samples": -1, "busy_percent": 50.0},
        {"samples": 1, "peak_memory_bytes": 1 << 63},
        {"samples": 1, "peak_memory_bytes": -1},
    ],
    ids=str,
)
def test_a_receipt_that_says_what_cannot_be_stops_the_ledger_for_nobody(
    services: Services, database: Database, use: dict[str, float]
) -> None:
    """User code has its attempt's token, and can send a receipt of its own."""
    hostile, honest = begun(database), begun(database)
    for run_id, seen in ((hostile, use), (honest, {"samples": 60, "busy_percent": 50.0})):
        write_facts(database, run_id, used(run_id, seconds=60))
        receipt = msgspec.json.encode({"facts": 3, "uses": [{"uuid": "GPU-0", **seen}]}).decode()
        end(database, run_id, at_ns=T0 + 60 * S, receipt=receipt)
    charge_all(services)
    for run_id in (hostile, honest):
        assert shape(database, run_id) == [("original", False, 120_000)]
    observed = {row["run_id"]: (row["observed_ms"], row["busy_ms"]) for row in rows(database, tables.utilisations)}
    assert observed == {hostile: (0, 0), honest: (60_000, 30_000)}


def test_sums_are_those_of_the_rows_and_unpriced_time_is_apart(services: Services, database: Database) -> None:
    for tariff in (TARIFF, Tariff()):
        run_id = begun(database, tariff=tariff)
        write_facts(database, run_id, used(run_id, seconds=60))
        end(database, run_id, at_ns=T0 + 60 * S)
    charge_all(services)
    (total,) = database.read(lambda connection: charges.sums(connection, from_day=T0 // DAY_NS))
    assert (total.billed_ms, total.unpriced_ms, total.micros) == (240_000, 120_000, 120_000)
    newest = database.read(charges.newest_seq)
    assert database.read(lambda connection: charges.sums(connection, after_seq=newest)) == []


def test_a_wait_goes_with_the_day_that_holds_when_another_one_vanishes(services: Services, database: Database) -> None:
    run_id = begun(database)
    add = charges.NewEntry(crew=(run_id, 1, 0), account_id=_account(database), posted=(), queued_ms=9, entries=())
    held = lines(used(run_id, seconds=60), TARIFF)
    first = msgspec.structs.replace(add, entries=post((), held, final=False))
    database.write(lambda connection: charges.insert(connection, [first], at_ns=T0))
    moved = [msgspec.structs.replace(line, day=line.day + 1) for line in held]
    posted = database.read(lambda connection: charges.of_run(connection, run_id))[1, 0]
    second = msgspec.structs.replace(add, posted=posted, entries=post([one.entry for one in posted], moved, final=True))
    database.write(lambda connection: charges.insert(connection, [second], at_ns=T0))
    assert net(database, run_id, "queued_ms") == 9
    kinds = [entry.kind for entry in entries(database, run_id)]
    assert kinds == [EntryKind.ORIGINAL, EntryKind.REVERSAL, EntryKind.ORIGINAL]


def _account(database: Database) -> int:
    return database.write(
        lambda connection: charges.ensure_account(connection, Account(owner="alice", gpu_type="H100"))
    )


def test_facts_of_some_attempts_are_looked_up_and_not_searched_for(database: Database) -> None:
    """SQLite looks several columns up in no index: a million facts would be read for each transaction."""
    ids = [(f"run-{number}", 1 + number % 2, 0) for number in range(3)]

    def work(connection: sa.Connection) -> list[str]:
        plans: list[str] = []

        def explained(own: sa.Connection, _: object, statement: str, parameters: Any, *__: object) -> None:
            if statement.startswith("SELECT"):
                plans.extend(row[3] for row in own.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters))

        if connection.dialect.name == "sqlite":
            sa.event.listen(connection, "before_cursor_execute", explained)
        facts.of_crews(connection, ids)
        facts.counts(connection, ids)
        return plans or ["SEARCH facts"]  # whether PostgreSQL does depends on how many rows it believes there are

    looks = [plan for plan in database.read(work) if "facts" in plan]
    assert looks and all(plan.startswith("SEARCH facts") for plan in looks), looks
