"""The database: transactions, writers that share a commit, and what is said when it is away."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import InvalidValue, ServerProblem, ServerUnavailable
from serverless_gpu.server.db import database as database_module
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.tables import audit, members, teams
from tests.support.golden import golden
from tests.support.server.postgres import Cluster

WAIT_S = 30


def add(name: str) -> Callable[[sa.Connection], None]:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.insert(teams).values(name=name, created_ns=1))

    return work


def names(connection: sa.Connection) -> list[str]:
    return list(connection.scalars(sa.select(teams.c.name).order_by(teams.c.name)))


def test_what_was_written_is_read_also_by_another_process(
    database: Database, open_again: Callable[[], Database]
) -> None:
    database.write(add("search"))
    assert database.read(names) == ["search"]
    assert open_again().read(names) == ["search"]


def test_a_work_that_raises_writes_nothing_and_its_caller_gets_the_exception(database: Database) -> None:
    def work(connection: sa.Connection) -> None:
        add("half")(connection)
        raise KeyError("reason")

    with pytest.raises(KeyError, match="reason"):
        database.write(work)
    assert database.read(names) == []


def test_foreign_keys_are_kept(database: Database) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        database.write(lambda connection: connection.execute(sa.insert(members).values(team="a", principal="b")))


def test_a_read_cannot_write(database: Database) -> None:
    with pytest.raises((sa.exc.DBAPIError, ServerUnavailable)):
        database.read(add("search"))
    assert database.read(names) == []


def test_a_read_sees_one_moment(database: Database) -> None:
    def work(connection: sa.Connection) -> tuple[list[str], list[str]]:
        before = names(connection)
        writer = threading.Thread(target=database.write, args=(add("meanwhile"),))
        writer.start()
        writer.join(WAIT_S)
        return before, names(connection)

    assert database.read(work) == ([], [])
    assert database.read(names) == ["meanwhile"]


def test_work_in_work_is_refused(database: Database) -> None:
    with pytest.raises(RuntimeError, match=re.escape(golden("server.database.inside-other-work"))):
        database.write(lambda _: database.read(names))
    with pytest.raises(RuntimeError, match=re.escape(golden("server.database.inside-other-work"))):
        database.read(lambda _: database.write(add("a")))


def test_a_failing_writer_does_not_take_others_with_it(database: Database) -> None:
    """Works that are sure to share a transaction on SQLite: the first holds the writer until all others wait."""
    waiting, go = threading.Event(), threading.Event()

    def first(connection: sa.Connection) -> None:
        add("00")(connection)
        waiting.set()
        assert go.wait(WAIT_S)

    def failing(connection: sa.Connection) -> None:
        add("lost")(connection)
        raise ZeroDivisionError

    with ThreadPoolExecutor(20) as threads:
        held = threads.submit(database.write, first)
        assert waiting.wait(WAIT_S)
        good = [threads.submit(database.write, add(f"{number:02}")) for number in range(1, 10)]
        bad = [threads.submit(database.write, failing) for _ in range(5)]
        twice = [threads.submit(database.write, add("twice")) for _ in range(2)]
        go.set()
        for future in (held, *good):
            future.result(WAIT_S)
        assert {type(future.exception(WAIT_S)) for future in bad} == {ZeroDivisionError}
        assert {type(future.exception(WAIT_S)) for future in twice} == {type(None), sa.exc.IntegrityError}
    assert database.read(names) == [*(f"{number:02}" for number in range(10)), "twice"]


def test_writers_that_add_to_the_same_row_lose_nothing(database: Database) -> None:
    database.write(add("counter"))

    def increase(connection: sa.Connection) -> None:
        now = connection.scalar(sa.select(teams.c.created_ns).where(teams.c.name == "counter"))
        assert now is not None
        connection.execute(sa.update(teams).where(teams.c.name == "counter").values(created_ns=now + 1))

    with ThreadPoolExecutor(16) as threads:
        for future in [threads.submit(database.write, increase) for _ in range(100)]:
            future.result(WAIT_S)
    assert database.read(lambda connection: connection.scalar(sa.select(teams.c.created_ns))) == 101


def test_look_then_insert_finds_what_another_writer_inserted_meanwhile(database: Database) -> None:
    def once(connection: sa.Connection) -> bool:
        if connection.scalar(sa.select(teams.c.name).where(teams.c.name == "one")) is not None:
            return False
        add("one")(connection)
        return True

    with ThreadPoolExecutor(16) as threads:
        made = [future.result(WAIT_S) for future in [threads.submit(database.write, once) for _ in range(50)]]
    assert made.count(True) == 1


def test_writes_of_one_thread_keep_their_order(database: Database) -> None:
    def entry(thread: int, number: int) -> Callable[[sa.Connection], None]:
        values = {"at_ns": number, "principal": f"p{thread}", "action": "test", "subject": ""}

        def work(connection: sa.Connection) -> None:
            connection.execute(sa.insert(audit).values(**values))

        return work

    def many(thread: int) -> None:
        for number in range(20):
            database.write(entry(thread, number))

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(many, thread) for thread in range(8)]:
            future.result(WAIT_S)
    query = sa.select(audit.c.principal, audit.c.at_ns).order_by(audit.c.seq)
    found = database.read(lambda connection: connection.execute(query).all())
    for thread in range(8):
        assert [at for principal, at in found if principal == f"p{thread}"] == list(range(20))


def test_a_closed_database_says_that_the_server_stops(database: Database) -> None:
    database.close()
    for do in (lambda: database.read(names), lambda: database.write(add("late"))):
        with pytest.raises(ServerUnavailable, match="stopping"):
            do()
    database.close()


def test_a_database_in_memory_works(tmp_path: Path) -> None:
    database = Database("sqlite://", clock=SystemClock())
    database.migrate()
    database.write(add("search"))
    assert database.read(names) == ["search"]
    database.close()


@pytest.mark.parametrize("url", ["mysql://host/name", "nonsense", "sqlite+pysqlcipher:///x"])
def test_another_kind_of_database_is_refused_with_what_would_do(url: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        Database(url, clock=SystemClock())
    assert "sqlite:///" in caught.value.hint


def test_a_database_program_that_is_too_old_is_named(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(database_module.OLDEST, database.kind, (99,))
    with pytest.raises(ServerProblem, match=f"{database.kind} [0-9.]+") as caught:
        database.migrate()
    assert "99 or newer" in caught.value.hint


def test_files_of_sqlite_may_be_read_by_their_owner_only(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/deep/server.db", clock=SystemClock())
    database.migrate()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "deep").iterdir()}
    database.close()
    assert modes == {"server.db": 0o600, "server.db-wal": 0o600, "server.db-shm": 0o600}


def test_sqlite_is_durable_and_in_wal_mode(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/server.db", clock=SystemClock())

    def settings(connection: sa.Connection) -> tuple[object, ...]:
        return tuple(connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous"))

    assert database.write(settings) == ("wal", 2)
    database.close()


@pytest.mark.parametrize("name", ["a\0b", "x" * 65])
def test_what_postgresql_does_not_take_is_the_askers_mistake(
    postgres: Cluster, postgres_template: str, name: str
) -> None:
    there = postgres.new_database(postgres_template)
    database = Database(postgres.url(there), clock=SystemClock())
    with pytest.raises(InvalidValue, match="does not fit"):
        database.write(add(name))
    database.close()
    postgres.drop_database(there)


def test_a_mistake_in_sql_is_no_reason_to_ask_again_later(database: Database) -> None:
    with pytest.raises(sa.exc.DBAPIError):
        database.read(lambda connection: connection.execute(sa.text("SELECT nothing FROM nowhere")))


def test_who_asks_is_not_told_where_the_database_is_and_the_log_is(
    postgres: Cluster, postgres_template: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = postgres.new_database(postgres_template)
    database = Database(postgres.url(name), clock=SystemClock())
    database.migrate()
    postgres.stop()
    try:
        for _ in range(10):
            with pytest.raises(ServerUnavailable) as caught:
                database.read(names)
            assert str(caught.value) == golden("server.database.database-does-answer")
    finally:
        postgres.start()
    assert len(caplog.messages) == 1 and "socket" in caplog.text
    assert database.read(names) == []
    database.close()
    postgres.drop_database(name)


def test_F35_a_restart_of_postgresql_is_said_and_survived(postgres: Cluster, postgres_template: str) -> None:
    name = postgres.new_database(postgres_template)
    database = Database(postgres.url(name), clock=SystemClock())
    database.write(add("before"))
    postgres.stop()
    try:
        for do in (lambda: database.read(names), lambda: database.write(add("meanwhile"))):
            with pytest.raises(ServerUnavailable, match="does not answer"):
                do()
    finally:
        postgres.start()
    database.write(add("after"))
    assert database.read(names) == ["after", "before"]
    database.close()
    postgres.drop_database(name)


def test_F35_a_restart_within_a_transaction_leaves_nothing_of_it(postgres: Cluster, postgres_template: str) -> None:
    name = postgres.new_database(postgres_template)
    database = Database(postgres.url(name), clock=SystemClock())

    def work(connection: sa.Connection) -> None:
        add("half")(connection)
        postgres.stop()
        postgres.start()
        add("other half")(connection)

    with pytest.raises(ServerUnavailable):
        database.write(work)
    assert database.read(names) == []
    database.close()
    postgres.drop_database(name)


def test_a_lock_that_somebody_forgot_is_not_waited_for_for_ever(
    postgres: Cluster, postgres_template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "WAIT_S", 1)
    name = postgres.new_database(postgres_template)
    database = Database(postgres.url(name), clock=SystemClock())
    with psycopg.connect(postgres.url(name)) as forgotten:
        forgotten.execute("LOCK TABLE teams")
        with pytest.raises(ServerUnavailable, match="lock timeout"):
            database.write(add("late"))
    database.write(add("late"))
    database.close()
    postgres.drop_database(name)


def test_a_number_that_no_database_holds_is_refused_and_costs_nothing(database: Database) -> None:
    from_the_future = {"name": "search", "created_ns": 1 << 70}
    with pytest.raises(InvalidValue, match=re.escape(golden("server.database.does-fit-into"))):
        database.write(lambda connection: connection.execute(teams.insert(), from_the_future))
    assert database.read(lambda connection: connection.execute(sa.select(teams)).all()) == []
