"""Reports of what was used, on both databases: the same sums by whatever they are grouped, and nothing of others."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.model.billing import usage_report
from serverless_gpu.model.billing.pricing import Price
from serverless_gpu.model.billing.usage_report import Amounts, DayRange, ReportRow
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.server.billing import usage_reports
from serverless_gpu.server.billing.usage_rollup import UsageRollup, fold
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import prices, usage
from serverless_gpu.server.records.usage import ReportRequest
from serverless_gpu.wire.billing import UsageView
from tests.support.server import ledgered
from tests.support.server.ledgered import HOUR_MS

ROOT = Caller(name="root", role="admin", token_id="t")
ALICE = Caller(name="alice", role="member", teams=("search",), token_id="t")
DAY = usage_report.day_of("2026-11-20")
ODD_KEY = 'a"b\\c.d[0] \u00fc%_'
BY: tuple[tuple[str, ...], ...] = (
    (),
    ("user",),
    ("team", "user"),
    ("pool",),
    ("policy",),
    ("gpu_type",),
    ("name",),
    ("workload", "environment"),
    ("run",),
    ("run", "day"),
    ("day",),
    ("week",),
    ("month", "team"),
    ("tag:stage",),
    (f"tag:{ODD_KEY}", "week"),
    ("tag:none",),
)


def wanted(*by: str, **fields: Any) -> ReportRequest:
    asked: dict[str, Any] = {"by": by, "window": DayRange(DAY - 60, DAY + 60), "limit": 1000} | fields
    return ReportRequest(**asked)


def report(services: Services, *by: str, who: Caller = ROOT, reach: str = AccessReach.ALL, **fields: Any) -> UsageView:
    return services.usage_reports.view(who, reach, wanted(*by, **fields))


def keys(view: UsageView) -> list[tuple[str, ...]]:
    return [group.key for group in view.groups]


def fill(connection: sa.Connection, seed: int, runs: int) -> None:
    """Write what random runs used: some without a price, taken back, provisional, of several attempts and days."""
    rng = random.Random(seed)
    for number in range(runs):
        tags = rng.choice([{}, {"stage": "eval"}, {"stage": "x\\u0000y", ODD_KEY: "v"}, {ODD_KEY: "ü"}])
        account = ledgered.account(
            connection,
            owner=rng.choice(["alice", "bob", "carol"]),
            team=rng.choice(["", "search", "ads"]),
            pool=rng.choice(["default", "lab"]),
            policy=rng.choice(["", "nightly"]),
            gpu_type=rng.choice(["H100", "CPU"]),
            name=rng.choice(["train", "eval"]),
            environment=rng.choice(["", "e1"]),
            currency=rng.choice(["USD", "USD", "EUR"]),
            tags=tags,
        )
        for fence in range(1, rng.choice([2, 2, 4])):
            for entry in range(1, rng.randint(2, 4)):
                day = DAY + rng.randint(-40, 40)
                used_ms = rng.randint(1, HOUR_MS) * rng.choice([1, 1, 1, -1])
                ledgered.charge(
                    connection,
                    f"r{number:04d}",
                    account,
                    day=day,
                    fence=fence,
                    number=entry,
                    provisional=rng.random() < 0.2,
                    gpu_ms=used_ms,
                    billed_ms=rng.choice([0, used_ms]),
                    queued_ms=rng.randint(0, 50),
                    idle_ms=rng.randint(0, 50),
                    micros=rng.choice([None, used_ms * 3]),
                    dbu_micros=rng.randint(0, 9),
                )
        ledgered.seen(connection, f"r{number:04d}", account, day=day, observed_ms=rng.randint(1, 90), busy_ms=1)


def reckoned(services: Services, by: tuple[str, ...]) -> dict[tuple[tuple[str, ...], str], Amounts]:
    """Return the same report, added up row by row, by code that knows no SQL but a SELECT of all."""
    window = DayRange(DAY - 60, DAY + 60)
    rows = services.database.read(lambda db: usage.page(db, window, (), after=0, limit=10_000))
    first = {
        run_id: min(row.posted.fence for row in rows if row.posted.run_id == run_id)
        for run_id in {row.posted.run_id for row in rows}
    }
    groups = []
    for row in rows:
        line = row.posted.entry.line
        amounts = Amounts(
            runs=row.posted.entry.number == 1 and row.posted.fence == first[row.posted.run_id],
            queued_ms=row.posted.queued_ms,
            unpriced_ms=line.billed_ms if line.micros is None else 0,
            provisional_ms=line.gpu_ms if row.posted.entry.provisional else 0,
            **{name: getattr(line, name) for name in line.__struct_fields__ if name in Amounts.__struct_fields__},
        )
        key = usage_report.key_of(by, row.account, run_id=row.posted.run_id, day=line.day)
        groups.append(ReportRow(key=key, currency=row.account.currency, amounts=amounts))
    return {(each.key, each.currency): each.amounts for each in usage_report.together(groups)}


def unseen(amounts: Amounts) -> Amounts:
    return msgspec.structs.replace(amounts, observed_ms=0, busy_ms=0)


@pytest.mark.every_case
@pytest.mark.parametrize("folded", ["nothing", "some", "all", "accounts are many"])
def test_any_grouping_adds_up_to_the_same(services: Services, folded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if folded == "accounts are many":
        monkeypatch.setattr(usage, "ACCOUNTS_FEW", 3)
    services.database.write(lambda connection: fill(connection, 7, 60))
    for limit in {"nothing": (), "some": (7, 30, 1)}.get(folded, (1000,)):
        services.database.write(partial(fold, limit=limit))
    whole = {total.currency: total.amounts for total in report(services).totals}
    assert set(whole) == {"USD", "EUR"} and sum(amounts.runs for amounts in whole.values()) == 60
    assert sum(amounts.observed_ms for amounts in whole.values()) > 0
    for by in BY:
        view = report(services, *by)
        found = {(group.key, group.currency): unseen(group.amounts) for group in view.groups}
        assert found == reckoned(services, by), by
        assert {total.currency: total.amounts for total in view.totals} == whole, by
        assert {total.currency: total.amounts for total in usage_report.totals(view.groups)} == whole, by
        assert not view.is_cut


def killed(limit: int, connection: sa.Connection) -> None:
    fold(connection, limit=limit)
    raise ZeroDivisionError


def test_charges_are_added_up_once_however_often_the_loop_is_killed(services: Services) -> None:
    services.database.write(lambda connection: fill(connection, 5, 50))
    before = {total.currency: total.amounts for total in report(services).totals}
    limit, is_more = 1, True
    while is_more:
        with pytest.raises(ZeroDivisionError):
            services.database.write(partial(killed, limit))
        is_more = services.database.write(partial(fold, limit=limit))
        assert {total.currency: total.amounts for total in report(services).totals} == before
        limit += 9
    loop = services.make(UsageRollup)
    assert loop.tick(0) == 60 * 10**9
    services.database.write(lambda connection: ledgered.charge(connection, "new", 1, day=DAY))
    assert loop.tick(0) == 60 * 10**9 and loop.tick(0) == 60 * 10**9
    (row,) = services.database.read(lambda db: db.execute(sa.select(sa.func.sum(tables.used_days.c.runs))).all())
    assert int(row[0]) == 51


def test_what_is_cut_is_in_the_totals_and_said(services: Services) -> None:
    services.database.write(lambda connection: fill(connection, 3, 40))
    whole = {total.currency: total.amounts for total in report(services).totals}
    for by in (("run",), ("user", "team"), ("day",), ("tag:stage", "user")):
        every = report(services, *by)
        cut = report(services, *by, limit=3)
        assert cut.is_cut and not every.is_cut and len(cut.groups) == 3
        assert {total.currency: total.amounts for total in cut.totals} == whole
        assert {total.currency: total.amounts for total in every.totals} == whole
        known = {(group.key, group.currency): group.amounts for group in every.groups}
        assert all(known[group.key, group.currency] == group.amounts for group in cut.groups)
        costs = sorted((amounts.micros or 0 for amounts in known.values()), reverse=True)
        if by != ("run",):  # those are chosen by what a run costs in every currency
            assert sorted((group.amounts.micros or 0 for group in cut.groups), reverse=True) == costs[:3]


@pytest.mark.parametrize("by", [("tag:stage",), ("tag:stage", "user"), ("day", f"tag:{ODD_KEY}"), ("tag:none",)])
@pytest.mark.parametrize("tags_of_groups", ["few accounts", "many accounts"])
def test_22C5_a_cut_report_by_tag_is_the_head_of_the_whole_where_accounts_are_many(
    services: Services, by: tuple[str, ...], tags_of_groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(connection: sa.Connection) -> None:
        fill(connection, 11, 40)
        for number in range(12):  # dearer than the rest: the groups that are shown have a tag
            tags = {"stage": f"s{number % 4 if tags_of_groups == 'many accounts' else number}", ODD_KEY: f"o{number}"}
            one = ledgered.account(connection, name=f"own{number}", tags=tags)
            ledgered.charge(connection, f"own{number}", one, day=DAY - number, micros=10**9 * (number + 1))
            ledgered.seen(connection, f"own{number}", one, day=DAY - number, observed_ms=7, busy_ms=number)

    services.database.write(work)
    few = report(services, *by)
    monkeypatch.setattr(usage, "ACCOUNTS_FEW", 3)
    every, cut = report(services, *by), report(services, *by, limit=2)
    whole = {total.currency: total.amounts for total in few.totals}
    assert every.groups == few.groups
    assert all({total.currency: total.amounts for total in one.totals} == whole for one in (every, cut))
    assert cut.is_cut == (len(every.groups) > 2)
    known = {(group.key, group.currency): group.amounts for group in every.groups}
    assert cut.groups and all(known[group.key, group.currency] == group.amounts for group in cut.groups)
    dearest = sorted(every.groups, key=lambda group: -(group.amounts.micros or 0))[:2]
    assert {group.key for group in cut.groups} == {group.key for group in dearest}


def test_22C5_a_report_by_tag_parses_no_json_of_accounts(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    services.database.write(lambda connection: fill(connection, 3, 40))
    monkeypatch.setattr(usage, "ACCOUNTS_FEW", 3)
    said: list[str] = []

    def work(connection: sa.Connection) -> None:
        sa.event.listen(connection, "before_cursor_execute", lambda *args: said.append(args[2]))
        usage.find(connection, wanted("tag:stage", limit=2, where={f"tag:{ODD_KEY}": "v"}))

    services.database.read(work)
    assert any("account_tags" in one for one in said) and not any("tags_json" in one for one in said)


def test_a_run_of_several_attempts_and_days_is_counted_once_where_it_began(services: Services) -> None:
    def work(connection: sa.Connection) -> None:
        account = ledgered.account(connection)
        for fence, number, day in ((2, 1, DAY), (2, 2, DAY + 1), (3, 1, DAY + 1), (5, 1, DAY + 2)):
            ledgered.charge(connection, "r1", account, day=day, fence=fence, number=number)

    services.database.write(work)
    assert [(group.key, group.amounts.runs) for group in report(services, "day").groups] == [
        (("2026-11-20",), 1),
        (("2026-11-21",), 0),
        (("2026-11-22",), 0),
    ]


def test_days_and_values_choose_what_is_counted(services: Services) -> None:
    def work(connection: sa.Connection) -> None:
        for at, (owner, team, tags) in enumerate(
            (("alice", "search", {"stage": "eval"}), ("bob", "search", {"stage": "it's"}), ("carol", "", {}))
        ):
            account = ledgered.account(connection, owner=owner, team=team, tags=tags)
            ledgered.charge(connection, f"r{at}", account, day=DAY + at)
            ledgered.seen(connection, f"r{at}", account, day=DAY + at, observed_ms=10, busy_ms=at)

    services.database.write(work)
    assert keys(report(services, "user", window=DayRange(DAY, DAY + 1))) == [("alice",)]
    assert keys(report(services, "user", window=DayRange(DAY + 1, DAY + 3))) == [("bob",), ("carol",)]
    assert keys(report(services, "user", where={"team": "search"})) == [("alice",), ("bob",)]
    assert keys(report(services, "user", where={"team": "search", "tag:stage": "it's"})) == [("bob",)]
    assert keys(report(services, "user", where={"tag:stage": ""})) == [("carol",)]
    view = report(services, "user", where={"run": "r2"})
    assert keys(view) == [("carol",)] and (view.totals[0].amounts.observed_ms, view.totals[0].amounts.busy_ms) == (
        10,
        2,
    )
    assert report(services, "user", where={"user": "nobody"}).totals == ()
    assert report(services, window=DayRange(0, 1)).groups == ()


def test_members_see_what_they_and_their_teams_used_and_nothing_of_others(services: Services) -> None:
    def work(connection: sa.Connection) -> None:
        for at, (owner, team) in enumerate(
            (("alice", ""), ("alice", "search"), ("bob", "search"), ("bob", "ads"), ("bob", ""))
        ):
            ledgered.charge(connection, f"r{at}", ledgered.account(connection, owner=owner, team=team), day=DAY)

    services.database.write(work)
    everybody = report(services, "user", "team")
    assert len(everybody.groups) == 5
    view = report(services, "user", "team", who=ALICE, reach=AccessReach.TEAM)
    assert sorted(keys(view)) == [("alice", ""), ("alice", "search"), ("bob", "search")]
    assert view.totals[0].amounts.micros == 9_000_000
    # Asking for more, or as somebody else, changes nothing.
    asked = wanted("user", seen_by=None, teams=("ads",), where={"user": "bob"})
    assert services.usage_reports.view(ALICE, AccessReach.TEAM, asked).totals[0].amounts.micros == 3_000_000
    own = report(services, "user", who=ALICE, reach=AccessReach.OWN)
    assert own.totals[0].amounts.micros == 6_000_000
    window = DayRange(DAY, DAY + 1)
    page = services.usage_reports.view_records(ALICE, AccessReach.TEAM, window, after=0, limit=100)
    assert {record.identity_metadata.run_as for record in page.records} == {"alice", "bob"} and len(page.records) == 3


def test_rows_come_in_pages_each_once(services: Services) -> None:
    def work(connection: sa.Connection) -> None:
        account = ledgered.account(connection)
        for at in range(25):
            ledgered.charge(connection, f"r{at:02d}", account, day=DAY, core_ms=at % 2, memory_mib_ms=at % 3)

    services.database.write(work)
    found: list[str] = []
    after: int | None = 0
    while after is not None:
        page = services.usage_reports.view_records(ROOT, AccessReach.ALL, DayRange(DAY, DAY + 1), after=after, limit=9)
        assert 0 < len(page.records) <= 9
        found += [record.record_id for record in page.records]
        after = page.after
    assert len(found) == len(set(found)) == 25 + 12 + 16
    none = services.usage_reports.view_records(ROOT, AccessReach.ALL, DayRange(0, 1), after=0, limit=9)
    assert (none.records, none.after) == ((), None)


def test_what_is_not_understood_is_refused(services: Services) -> None:
    for text in (
        "{",
        "[]",
        '{"owner":"a"}',
        '{"day":"2026-11-01"}',
        '{"user":1}',
        json.dumps({f"tag:{n}": "" for n in range(17)}),
    ):
        with pytest.raises(InvalidValue):
            usage_reports.where_of(text)
    assert usage_reports.where_of("") == {}
    with pytest.raises(InvalidValue, match="ends before it"):
        services.usage_reports.window(10, 10)
    today = services.clock.wall_ns() // DAY_NS
    assert services.usage_reports.window(None, None) == (today - 29, today + 1)


def test_a_tag_that_postgresql_cannot_hold_breaks_nobodys_report(services: Services) -> None:
    def work(connection: sa.Connection) -> None:
        for at, tags in enumerate(({"stage": "x\0y"}, {"stage": "eval"}, {"o\0": "", "stage": "eval"})):
            ledgered.charge(connection, f"r{at}", ledgered.account(connection, tags=tags), day=DAY)

    services.database.write(work)
    view = report(services, "tag:stage")
    assert view.totals[0].amounts.runs == 3
    assert max(group.amounts.runs for group in view.groups if group.key == ("eval",)) >= 1
    for text in ('{"user":"a\\u0000"}', '{"tag:a\\u0000":""}'):
        with pytest.raises(InvalidValue):
            usage_reports.where_of(text)
    with pytest.raises(InvalidValue):
        usage_report.parse_by("tag:a\0")


def test_a_ledger_with_nothing_in_it_is_a_report_with_nothing_in_it(database: Database, services: Services) -> None:
    for by in BY:
        view = report(services, *by)
        assert (view.groups, view.totals, view.is_cut) == ((), (), False)


def test_the_price_book_has_a_row_for_each_pool_in_which_something_was_used(services: Services) -> None:
    def work(connection: sa.Connection) -> None:
        ledgered.account(connection, gpu_type="A100-80", pool="lab")
        prices.insert(connection, Price(resource="A100", micros_per_hour=2_500_000, from_ns=DAY * DAY_NS), at_ns=1)

    services.database.write(work)
    found = services.usage_reports.view_prices()
    assert [(row.sku_name, row.pricing.default, row.price_start_time[:10]) for row in found.prices] == [
        ("SERVERLESS_GPU_A100", "2.5", "2026-11-20"),
        ("SERVERLESS_GPU_A100-80@lab", "2.5", "2026-11-20"),
    ]
    assert not found.is_cut


def test_keys_of_tags_are_those_of_usage_that_the_caller_may_see(services: Services, database: Database) -> None:
    def work(connection: sa.Connection) -> None:
        ledgered.account(connection, owner="alice", tags={"stage": "dev", ODD_KEY: "x"})
        ledgered.account(connection, owner="bob", tags={"project": "secret", "stage": "prod"})
        ledgered.account(connection, owner="bob", team="search", tags={"shared": "1"})

    database.write(work)
    reports = services.usage_reports
    assert reports.view_tags(ROOT, AccessReach.ALL).keys == tuple(sorted((ODD_KEY, "project", "shared", "stage")))
    assert set(reports.view_tags(ALICE, AccessReach.TEAM).keys) == {ODD_KEY, "shared", "stage"}
    assert set(reports.view_tags(ALICE, AccessReach.OWN).keys) == {ODD_KEY, "stage"}


def test_runs_of_one_name_have_a_mean_and_a_median_cost(
    services: Services, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(connection: sa.Connection) -> None:
        train = ledgered.account(connection, name="train", owner="alice")
        other = ledgered.account(connection, name="eval", owner="bob")
        for number, micros in enumerate((1, 2, 9)):
            ledgered.charge(connection, f"run-{number}", train, day=DAY, micros=micros)
        ledgered.charge(connection, "run-2", train, day=DAY + 1, number=2, micros=6)
        ledgered.charge(connection, "run-3", other, day=DAY, micros=100)
        ledgered.charge(connection, "run-4", other, day=DAY, micros=None)
        ledgered.charge(connection, "run-5", other, day=DAY - 90, micros=7)

    database.write(work)
    view = services.usage_reports.view_names(ROOT, AccessReach.ALL, wanted("name"))
    assert [(one.name, one.runs, one.mean_micros, one.median_micros) for one in view.names] == [
        ("eval", 1, 100, 100),
        ("train", 3, 6, 2),
    ]
    assert not view.is_cut
    mine = services.usage_reports.view_names(ALICE, AccessReach.OWN, wanted("name", where={"gpu_type": "H100"}))
    assert [one.name for one in mine.names] == ["train"]
    monkeypatch.setattr(usage_reports, "NAME_ENTRIES_MAX", 1)
    cut = services.usage_reports.view_names(ROOT, AccessReach.ALL, wanted("name"))
    assert ([one.mean_micros for one in cut.names], cut.is_cut) == ([6], True)
