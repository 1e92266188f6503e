"""What goes on is in reports before the ledger says it, each GPU-second once; and what demand was, for advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.model.billing.usage_report import Amounts, DayRange
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.lifecycle.attempt import FactKind
from serverless_gpu.server.billing import usage_reports
from serverless_gpu.server.billing.charging import Charging
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle.metering import Now
from serverless_gpu.server.records import charges
from serverless_gpu.server.records.usage import DemandFilter, ReportRequest
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.billing import DemandRow, UsageView
from tests.support.server.charged import charge_all
from tests.support.server.charging import HOUR_S, MIDNIGHT, begun, end, fact, late, used, write_facts
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people

ROOT = Caller(name="root", role="admin", token_id="t")
DAY = T0 // DAY_NS
HOUR_MS = 3_600_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    add_people(database, "alice", "bob")
    add_node(database)
    return made_services(database, tmp_path, clock=clock)


def report(services: Services, *by: str, who: Caller = ROOT, reach: str = AccessReach.ALL, **fields: Any) -> UsageView:
    asked: dict[str, Any] = {"by": by, "window": DayRange(DAY - 1, DAY + 3), "limit": 100} | fields
    return services.usage_reports.view(who, reach, ReportRequest(**asked))


def whole(services: Services) -> Amounts:
    (total,) = report(services).totals
    return total.amounts


def without_marks(amounts: Amounts) -> Amounts:
    return msgspec.structs.replace(amounts, going_ms=0, queued_ms=0)


def test_what_goes_on_is_in_the_report_and_the_ledger_says_the_same_later(
    services: Services, database: Database
) -> None:
    run_id = begun(database, name="train")
    write_facts(database, run_id, used(run_id, seconds=HOUR_S, until=FactKind.ALIVE))
    view = report(services, "user", "name")
    assert [(group.key, group.amounts.micros, group.amounts.going_ms) for group in view.groups] == [
        (("alice", "train"), 7_200_000, 2 * HOUR_MS)
    ]
    assert (view.going, view.is_going_cut) == (1, False)
    write_facts(database, run_id, [fact(run_id, 3, FactKind.FREED, T0 + HOUR_S * S)])
    end(database, run_id, at_ns=T0 + HOUR_S * S)
    before = whole(services)
    assert before.going_ms == 2 * HOUR_MS and before.runs == 1
    charge_all(services)
    after = whole(services)
    assert after.going_ms == 0 and report(services).going == 0
    assert without_marks(after) == without_marks(before)


def test_what_goes_on_is_in_the_report_up_to_when_it_was_heard_of(
    services: Services, database: Database, clock: FakeClock
) -> None:
    run_id = begun(database)
    write_facts(database, run_id, used(run_id, seconds=0)[:2])
    clock.advance(8)
    services.leases.renew((run_id, 1, 0), now_ns=clock.boottime_ns())
    assert whole(services).going_ms == 16_000
    # A clock that is set makes two minutes of it at most.
    clock.step_wall(3 * HOUR_S)
    assert whole(services).going_ms == 240_000


def test_days_that_are_charged_count_once_while_their_attempt_goes_on(
    services: Services, database: Database, clock: FakeClock
) -> None:
    start_ns = MIDNIGHT - HOUR_S * S
    run_id = begun(database, at_ns=start_ns)
    write_facts(database, run_id, used(run_id, seconds=2 * HOUR_S, at_ns=start_ns, until=FactKind.ALIVE))
    before = whole(services)
    charging = services.make(Charging)
    charge_all(services, charging)
    clock.advance(MIDNIGHT / 1e9 - T0 / 1e9 + 2 * HOUR_S)
    charge_all(services, charging)
    assert len(database.read(lambda connection: charges.of_run(connection, run_id))[1, 0]) == 1
    view = report(services, "day")
    assert [group.amounts.micros for group in view.groups] == [7_200_000, 7_200_000]
    assert [group.amounts.going_ms for group in view.groups] == [0, 2 * HOUR_MS]
    assert without_marks(whole(services)) == without_marks(before)
    page = services.usage_reports.view_demand(
        ROOT, AccessReach.ALL, DemandFilter(from_ns=0, to_ns=1 << 62), after=0, limit=10
    )
    assert [(row.day, row.gpu_ms) for row in page.rows] == [
        (start_ns // DAY_NS, 2 * HOUR_MS),
        (MIDNIGHT // DAY_NS, 2 * HOUR_MS),
    ]


def test_facts_that_come_late_are_in_the_report_before_they_are_charged(services: Services, database: Database) -> None:
    run_id = begun(database)
    write_facts(database, run_id, used(run_id, seconds=60, until=FactKind.ALIVE))
    end(database, run_id, at_ns=T0 + 60 * S)
    charge_all(services)
    assert whole(services).provisional_ms == 120_000
    late(services, run_id, [fact(run_id, 3, FactKind.FREED, T0 + 90 * S)])
    before = whole(services)
    assert (before.gpu_ms, before.going_ms, before.micros, before.runs) == (180_000, 60_000, 180_000, 1)
    charge_all(services)
    after = whole(services)
    assert (after.gpu_ms, after.going_ms, after.micros, after.runs, after.provisional_ms) == (180_000, 0, 180_000, 1, 0)


def test_what_goes_on_is_shown_to_those_who_may_see_it(services: Services, database: Database) -> None:
    for owner in ("alice", "bob"):
        run_id = begun(database, owner=owner, tags={"stage": owner}, team="search" if owner == "bob" else "")
        write_facts(database, run_id, used(run_id, seconds=HOUR_S, until=FactKind.ALIVE))
    alice = Caller(name="alice", role="member", token_id="t")
    mate = Caller(name="carol", role="member", teams=("search",), token_id="t")
    assert [group.key for group in report(services, "user").groups] == [("alice",), ("bob",)]
    assert [group.key for group in report(services, "user", who=alice, reach=AccessReach.TEAM).groups] == [("alice",)]
    assert [group.key for group in report(services, "user", who=mate, reach=AccessReach.TEAM).groups] == [("bob",)]
    assert report(services, who=mate, reach=AccessReach.OWN).groups == ()
    assert [group.key for group in report(services, "user", where={"tag:stage": "bob"}).groups] == [("bob",)]
    assert report(services, window=DayRange(DAY + 1, DAY + 2)).groups == ()
    for who, count in ((ROOT, 2), (alice, 1), (mate, 1)):
        reach = AccessReach.ALL if who is ROOT else AccessReach.TEAM
        page = services.usage_reports.view_demand(who, reach, DemandFilter(from_ns=0, to_ns=1 << 62), after=0, limit=10)
        assert len(page.rows) == count
    nobody = DemandFilter(from_ns=0, to_ns=1 << 62, pool="none")
    assert services.usage_reports.view_demand(ROOT, AccessReach.ALL, nobody, after=0, limit=10).rows == ()


def test_more_attempts_than_are_looked_at_are_said(services: Services, database: Database) -> None:
    for _ in range(3):
        run_id = begun(database)
        write_facts(database, run_id, used(run_id, seconds=HOUR_S, until=FactKind.ALIVE))
    found = database.read(
        lambda connection: usage_reports.find_unposted(connection, Now(wall_ns=T0), currency="USD", limit=2)
    )
    assert (found.attempts, found.is_cut, len(found.lines)) == (2, True, 2)


def test_demand_is_what_holds_now_in_pages(services: Services, database: Database) -> None:
    ids = []
    for at in range(5):
        run_id = begun(database, at_ns=T0 + at * S)
        ids.append(run_id)
        write_facts(database, run_id, used(run_id, seconds=60, at_ns=T0 + at * S, until=FactKind.ALIVE))
        end(database, run_id, at_ns=T0 + (60 + at) * S)
    charge_all(services)
    late(services, ids[0], [fact(ids[0], 3, FactKind.FREED, T0 + 90 * S)])
    charge_all(services)  # the first one has three entries now
    found: list[DemandRow] = []
    after = 0
    while True:
        page = services.usage_reports.view_demand(
            ROOT, AccessReach.ALL, DemandFilter(from_ns=0, to_ns=1 << 62), after=after, limit=2
        )
        found += page.rows
        if not page.cursor:
            break
        after = int(page.cursor)
    assert sorted(row.run_id for row in found) == sorted(ids)
    first = next(row for row in found if row.run_id == ids[0])
    assert (first.gpu_ms, first.gpus, first.queued_ms, first.lent_ms) == (180_000, 2, 2_000, first.lent_ms)
    assert first.lent_ms >= first.gpu_ms and first.pool == "default"
    then = DemandFilter(from_ns=T0 + 70 * S, to_ns=1 << 62)
    assert [
        row.run_id for row in services.usage_reports.view_demand(ROOT, AccessReach.ALL, then, after=0, limit=9).rows
    ] == [ids[0]]
