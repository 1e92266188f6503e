"""A server that looks at its own books finds what is wrong, says it once, counts it, and disturbs nobody."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.program import sgpu
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.server.audit import ChainCheck
from serverless_gpu.server.composition import Services, make_scheduler, make_self_check
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import invariant_inputs, self_check
from serverless_gpu.server.invariants.self_check import check as checked
from serverless_gpu.server.records import audit, runs
from serverless_gpu.server.records.audit import SERVER, Action
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import AgentHello
from serverless_gpu.wire.base import PROTOCOL
from tests.support.golden import golden
from tests.support.server.invariants import finished, submitted
from tests.support.server.stored import add_node, add_people


@pytest.fixture
def people(database: Database) -> Database:
    add_people(database, "alice")
    add_node(database)
    hello = AgentHello(
        name="n1",
        machine="m",
        boot_id="boot-1",
        version="1",
        protocol=PROTOCOL,
        python="3.11",
        platform="linux-x86_64",
        devices=(),
    )
    said = tables.nodes.update().values(hello_json=msgspec.json.encode(hello).decode())
    database.write(lambda connection: connection.execute(said))
    return database


def break_end(database: Database, run_id: str) -> None:
    change = tables.runs.update().where(tables.runs.c.id == run_id).values(state="FAILED", reason="rank_raised")
    database.write(lambda connection: connection.execute(change))


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_is_wrong_is_said_once_and_counted(
    people: Database, services: Services, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = finished(people)
    check = make_self_check(services)
    assert check.tick(clock.boottime_ns()) == clock.boottime_ns() + 60 * 10**9
    assert (check.seen, check.found, errors(caplog)) == (1, 0, [])
    break_end(people, run_id)
    check.tick(clock.boottime_ns())
    said = errors(caplog)
    sentence = f"I2 run {run_id}: the run was SUCCEEDED (completed) and is now FAILED (rank_raised)"
    assert golden("server.self_check.never-true-true", sentence=sentence) in said
    check.tick(clock.boottime_ns())
    assert errors(caplog) == said and check.found == len(said)
    assert f'sgpu_violations_total{{invariant="I2"}} {float(len(said))}'.encode() in services.measures.text()


def test_all_runs_are_looked_at_page_by_page(
    people: Database, services: Services, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        submitted(people)
    make_scheduler(services).tick(clock.boottime_ns())
    load = invariant_inputs.load

    def pages_of_two(connection: sa.Connection, *, after: str) -> invariant_inputs.RecordedRuns:
        return load(connection, after=after, limit=2)

    monkeypatch.setattr(invariant_inputs, "load", pages_of_two)
    check = make_self_check(services)
    pauses = [((check.tick(clock.boottime_ns()) or 0) - clock.boottime_ns()) // 10**9 for _ in range(4)]
    assert (pauses, check.seen) == ([5, 5, 60, 5], 7)


CHANGED = "entry {0} or the entry before it was changed after it was written"


def chained(database: Database, count: int) -> None:
    """Have so many rows in the audit, and all of them in its chain."""

    def write(connection: sa.Connection) -> None:
        for number in range(count):
            audit.record(connection, who=SERVER, action=Action.POOL_PUT, subject=f"pool-{number}", now_ns=1)

    database.write(write)
    database.write(lambda connection: audit.chain(connection, after_seq=0, limit=1_000))


def changed_row(database: Database, number: int) -> None:
    seq = sa.select(tables.audit_links.c.seq).where(tables.audit_links.c.number == number).scalar_subquery()
    change = tables.audit.update().where(tables.audit.c.seq == seq).values(principal="mallory")
    database.write(lambda connection: connection.execute(change))


def test_I8_a_changed_entry_of_the_audit_is_found_and_those_behind_it_too(
    people: Database, services: Services, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    chained(people, 9)
    check = make_self_check(services)
    check.tick(clock.boottime_ns())
    assert errors(caplog) == []
    changed_row(people, 3)
    changed_row(people, 7)
    check.tick(clock.boottime_ns())
    check.tick(clock.boottime_ns())
    what = f"invariant violated: I8 audit entry {{0}}: {CHANGED}"
    assert errors(caplog) == [what.format(3), what.format(7)] and check.found == 2
    assert [one.subject for one in checked(people.read).violations] == ["audit entry 3", "audit entry 7"]


def test_I8_the_chain_is_followed_in_pages_and_on_from_where_it_ended(people: Database) -> None:
    chained(people, 5)
    chain = ChainCheck()
    assert [(chain.look(people.read, limit=2), chain.done) for _ in range(3)] == [([], False), ([], False), ([], True)]
    chained(people, 1)
    changed_row(people, 2)
    assert chain.look(people.read, limit=2) == [] and chain.done
    chain.begin_again()
    assert chain.look(people.read, limit=2) == [(2, CHANGED.format(2))]


def test_I8_a_chain_that_was_cut_off_or_written_anew_is_not_the_one_before(people: Database) -> None:
    chained(people, 6)
    chain = ChainCheck()
    assert chain.look(people.read) == []
    links = tables.audit_links
    people.write(lambda connection: connection.execute(links.delete().where(links.c.number > 4)))
    chain.begin_again()
    assert chain.look(people.read) == [(6, golden("server.self_check.audit-went-far"))]
    people.write(lambda connection: connection.execute(links.delete()))
    people.write(lambda connection: connection.execute(tables.audit.update().values(principal="mallory")))
    people.write(lambda connection: audit.chain(connection, after_seq=0, limit=1_000))
    chain.begin_again()
    assert chain.look(people.read) == [(4, golden("server.self_check.another-one-before"))]


def test_I8_an_entry_that_is_gone_or_no_json_is_said(people: Database) -> None:
    chained(people, 4)
    links = tables.audit_links
    people.write(lambda connection: connection.execute(links.delete().where(links.c.number == 2)))
    assert ChainCheck().look(people.read)[0] == (3, golden("server.self_check.entry-missing-entry"))
    people.write(lambda connection: connection.execute(tables.audit.update().values(detail_json="{")))
    [(number, sentence)] = ChainCheck().look(people.read)
    assert number == 1 and "cannot be read" in sentence


def test_a_run_that_waits_untold_is_found_after_a_minute(
    people: Database, services: Services, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = submitted(people)
    check = make_self_check(services)
    check.tick(clock.boottime_ns())
    clock.advance(61)
    assert errors(caplog) == []
    check.tick(clock.boottime_ns())
    assert errors(caplog) == [golden("server.self_check.never-true-true-i14", run_id=run_id)]
    for _ in range(3):
        clock.advance(5)
        check.tick(clock.boottime_ns())
    assert (len(errors(caplog)), check.found) == (1, 1)
    make_scheduler(services).tick(clock.boottime_ns())
    check.tick(clock.boottime_ns())
    services.sentences.close()
    check.tick(clock.boottime_ns())
    clock.advance(62)
    check.tick(clock.boottime_ns())
    assert [line[-4:] for line in errors(caplog)] == ["61 s", "62 s"]


def test_when_more_is_wrong_than_anybody_reads_the_log_says_so(
    people: Database,
    services: Services,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_check, "TOLD_MAX", 2)
    for _ in range(4):
        submitted(people)
    check = make_self_check(services)
    for seconds in (0, 61, 5):
        clock.advance(seconds)
        check.tick(clock.boottime_ns())
    said = errors(caplog)
    assert ["without a reason" in line for line in said] == [True, True, False]
    assert said[2] == golden("server.self_check.more-things-wrong")


def test_a_device_that_was_lent_twice_is_found_pages_apart(people: Database, clock: FakeClock) -> None:
    one, other = finished(people), finished(people)  # on the same device, at the same time
    whole = self_check.check(people.read)
    assert {(found.invariant, found.subject) for found in whole.violations} == {("I4", "device GPU-0")}
    assert self_check.check(people.read, limit=1).violations == whole.violations
    assert all(one in found.sentence or other in found.sentence for found in whole.violations)


def test_a_store_that_is_away_is_no_violation(
    people: Database, services: Services, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_digests: object) -> None:
        raise ServerUnavailable("the store does not answer")

    run_id = finished(people)
    in_store = tables.files.update().where(tables.files.c.name == "results/1.pkl")
    in_store = in_store.values(inline=None, parts_json=f'["{"0" * 64}"]')
    people.write(lambda connection: connection.execute(in_store))
    monkeypatch.setattr(services.blobs, "missing", away)
    check = make_self_check(services)
    check.tick(clock.boottime_ns())
    assert check.found == 0
    monkeypatch.undo()
    check.tick(clock.boottime_ns())
    assert check.found == 1 and run_id


def test_the_command_says_what_is_wrong_and_exits_with_1(home: Path) -> None:
    (home / "server").mkdir(parents=True)
    runner = CliRunner()
    assert golden("server.self_check.server-home") in str(runner.invoke(sgpu, ["server", "check"]).exception)
    database = Database(f"sqlite:///{home}/server/server.db", clock=SystemClock())
    database.migrate()
    add_people(database, "alice")
    add_node(database)
    run_id = finished(database)
    done = runner.invoke(sgpu, ["server", "check"])
    assert (done.exit_code, done.output) == (0, "0 violations in 1 runs\n")
    gone = sa.delete(tables.files).where(tables.files.c.name == "results/1.pkl")
    database.write(lambda connection: connection.execute(gone))
    database.close()
    done = runner.invoke(sgpu, ["server", "check"])
    said = f"I6 run {run_id}: the run has succeeded, but only 1 of 2 results exist\n1 violations in 1 runs\n"
    assert (done.exit_code, done.output) == (1, said)


def test_who_is_in_doubt_is_looked_at_more_often_than_at_the_ends_of_a_minute(
    people: Database, services: Services, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    submitted(people)
    check = make_self_check(services)
    for _ in range(10):  # an unlucky look now and then
        again_ns = check.tick(clock.boottime_ns())
        assert again_ns == clock.boottime_ns() + 5 * 10**9
        clock.advance(5)
        make_scheduler(services).tick(clock.boottime_ns())
        assert check.tick(clock.boottime_ns()) == clock.boottime_ns() + 60 * 10**9
        services.sentences.close()
        clock.advance(60)
    assert errors(caplog) == []


def test_of_a_long_queue_no_more_is_read_than_is_looked_at(people: Database) -> None:
    for _ in range(5):
        submitted(people)
    assert len(people.read(lambda connection: runs.queue(connection, limit=3))) == 3
    assert len(people.read(runs.queue)) == 5
