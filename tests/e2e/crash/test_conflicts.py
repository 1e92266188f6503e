"""F37: transactions that PostgreSQL refuses because others change the same rows are done again, and nobody notices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import sqlalchemy as sa

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.server.db import database as database_module
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.tables import teams
from serverless_gpu.server.http.routing import problem_response
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.server.postgres import cluster

WAIT_S = 30


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the url of a PostgreSQL database with the teams `one` and `two`."""
    with cluster() as running:
        made = running.url(running.new_database())
        database = Database(made, clock=SystemClock())
        database.migrate()
        rows = [{"name": name, "created_ns": 1} for name in ("one", "two")]
        database.write(lambda connection: connection.execute(teams.insert(), rows))
        database.close()
        yield made


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """Yield the database as a server has it."""
    opened = Database(url, clock=SystemClock())
    yield opened
    opened.close()


def touch(connection: sa.Connection, name: str) -> None:
    connection.execute(teams.update().where(teams.c.name == name).values(created_ns=teams.c.created_ns + 1))


def count(connection: sa.Connection) -> dict[str, int]:
    return {name: seen for name, seen in connection.execute(sa.select(teams.c.name, teams.c.created_ns))}


def someone_changes(url: str, name: str) -> None:
    """Have another session change a row, at once and for good."""
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("UPDATE teams SET created_ns = created_ns + 1000 WHERE name = %s", (name,))


def changed_while_at_work(url: str, times: int) -> tuple[Callable[[sa.Connection], None], list[int]]:
    """Return a work whose row another session changes after it has begun, so often; and how often it was begun."""
    begun: list[int] = []

    def work(connection: sa.Connection) -> None:
        count(connection)  # from here on it sees this moment
        begun.append(1)
        if len(begun) <= times:
            someone_changes(url, "one")
        touch(connection, "one")

    return work, begun


def test_F37_a_serialisation_failure_is_invisible_up_to_five_times(database: Database, url: str) -> None:
    before = database.read(count)["one"]
    work, begun = changed_while_at_work(url, 5)
    database.write(work)
    assert len(begun) == 6
    assert database.read(count)["one"] == before + 5 * 1000 + 1


def test_F37_after_that_it_is_a_503_to_be_asked_again_and_nothing_is_written(database: Database, url: str) -> None:
    before = database.read(count)["one"]
    work, begun = changed_while_at_work(url, 100)
    with pytest.raises(ServerUnavailable, match=re.escape(golden("crash.conflicts.others-change-same"))) as raised:
        database.write(work)
    assert len(begun) == database_module.TRIES == 6
    assert database.read(count)["one"] == before + 6 * 1000
    answer = problem_response(raised.value)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    database.write(lambda connection: touch(connection, "one"))


def test_F37_a_deadlock_is_invisible_and_both_get_what_they_wanted(database: Database, url: str) -> None:
    before = database.read(count)
    begun: list[int] = []
    with psycopg.connect(url) as other, ThreadPoolExecutor(1) as pool:
        other.execute("SET deadlock_timeout = '60s'")  # so that it is ours that PostgreSQL ends
        other.execute("UPDATE teams SET created_ns = created_ns + 1000 WHERE name = 'two'")

        def work(connection: sa.Connection) -> None:
            begun.append(1)
            touch(connection, "one")
            if len(begun) == 1:
                crossing.append(pool.submit(cross))
                wait_for(lambda: waits(url), "the other session waits for ours", limit_s=WAIT_S)
            touch(connection, "two")

        def cross() -> None:
            other.execute("UPDATE teams SET created_ns = created_ns + 1000 WHERE name = 'one'")
            other.commit()

        crossing: list[object] = []
        database.write(work)
    assert len(begun) > 1
    after = database.read(count)
    assert after == {name: seen + 1001 for name, seen in before.items()}


def waits(url: str) -> bool:
    """Return whether somebody waits for a row."""
    with psycopg.connect(url, autocommit=True) as looking:
        row = looking.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
        return row is not None and row[0] > 0
