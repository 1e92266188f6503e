"""Migrations: they make the tables that the program uses, on both databases, and nothing else touches them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import ServerProblem
from serverless_gpu.server.db import migrations
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.tables import metadata
from tests.support.server.postgres import Cluster


@pytest.fixture(params=["sqlite", "postgresql"])
def bare_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the url of a database without tables, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/server.db"
    postgres: Cluster = request.getfixturevalue("postgres")
    return postgres.url(postgres.new_database())


@pytest.fixture
def bare(bare_url: str) -> Iterator[Callable[[], Database]]:
    """Yield a function that opens one and the same database, which has no tables at first."""
    opened: list[Database] = []

    def open_one() -> Database:
        opened.append(Database(bare_url, clock=SystemClock()))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def by_alembic(connection: sa.Connection) -> None:
    """Make everything with the revisions, as an old database is brought up."""
    connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    migrations.upgrade(connection)


def shape(connection: sa.Connection) -> dict[str, object]:
    """Return what a database says about each table: columns, keys, indexes, constraints."""
    inspector = sa.inspect(connection)
    found: dict[str, object] = {}
    for table in sorted(inspector.get_table_names()):
        columns = [{**column, "type": str(column["type"])} for column in inspector.get_columns(table)]
        found_indexes = sorted(inspector.get_indexes(table), key=lambda index: str(index["name"]))
        indexes = [
            {**index, "dialect_options": {key: str(value) for key, value in index.get("dialect_options", {}).items()}}
            for index in found_indexes
        ]
        uniques = sorted(inspector.get_unique_constraints(table), key=lambda unique: str(unique["name"]))
        foreign = sorted(inspector.get_foreign_keys(table), key=lambda key: str(key["name"]))
        found[table] = (columns, inspector.get_pk_constraint(table), indexes, uniques, foreign)
    return found


def test_the_newest_revision_is_the_one_that_the_program_asks_for() -> None:
    directory = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert directory.get_heads() == [migrations.HEAD]


def test_revisions_and_tables_agree(bare: Callable[[], Database]) -> None:
    """Where they differ, this prints what a revision has to do."""
    database = bare()

    def compare(connection: sa.Connection) -> list[object]:
        by_alembic(connection)
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    assert database.write(compare) == []


def test_tables_made_at_once_and_by_revisions_are_the_same(bare: Callable[[], Database]) -> None:
    database = bare()

    class Undo(Exception):
        pass

    made: list[dict[str, object]] = []

    def revisions(connection: sa.Connection) -> None:
        by_alembic(connection)
        made.append(shape(connection))
        raise Undo

    with pytest.raises(Undo):
        database.write(revisions)
    database.migrate()
    assert database.read(shape) == made[0]


def test_22A3_an_upgrade_binds_each_nodes_token_to_the_node_that_used_it_last(bare: Callable[[], Database]) -> None:
    database = bare()

    def before(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
        migrations.upgrade(connection, "0001")
        rows: dict[str, list[dict[str, object]]] = {
            "principals": [{"name": "node", "kind": "service", "role": "agent", "created_ns": 1}],
            "pools": [{"name": "default", "kind": "on-demand", "lends": False, "return_s": 1.0, "created_ns": 1}],
            "tokens": [
                {"id": one, "sha256": one, "principal": "node", "label": "", "scopes_json": "[]", "created_ns": 1}
                for one in ("t1", "t2")
            ],
            "nodes": [
                {"id": name, "name": name, "machine": "m", "boot_id": "b", "principal": "node", "token_id": token}
                | {"pool": "default", "hello_json": json.dumps({"instance": f"home of {name}"}), "rules_json": "{}"}
                | {"seen_ns": seen_ns, "forgotten_ns": 9 if name == "dead" else None}
                for name, token, seen_ns in (("late", "t1", 5), ("early", "t1", 4), ("dead", "t2", 7), ("old", "", 3))
            ],
        }
        for table, values in rows.items():
            there = sa.Table(table, sa.MetaData(), autoload_with=connection)
            connection.execute(there.insert(), values)

    database.write(before)
    database.migrate()
    bound = database.read(lambda connection: connection.execute(sa.select(metadata.tables["node_bindings"])).all())
    assert [tuple(row) for row in bound] == [("t1", "late", "m", "home of late", 5, 5, "upgrade", "", None, None)]


def test_22C5_an_upgrade_writes_the_tags_of_accounts_as_rows(bare: Callable[[], Database]) -> None:
    database = bare()
    tags: list[dict[str, str]] = [{}, {"a": "1", 'b"\\': "ü"}, {"a": ""}, {"a": "x\0y", "o\0": "v"}, {"a": "1"}]

    def before(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
        migrations.upgrade(connection, "0008")
        accounts = sa.Table("accounts", sa.MetaData(), autoload_with=connection)
        text = {column.name: "x" for column in accounts.columns if isinstance(column.type, sa.String)}
        rows = [
            {**text, "id": number + 1, "sha256": str(number), "reserved": False, "tags_json": json.dumps(one)}
            for number, one in enumerate(tags)
        ]
        connection.execute(accounts.insert(), rows)

    database.write(before)
    database.migrate()
    there = metadata.tables["account_tags"]
    query = sa.select(there.c.key, there.c.account_id, there.c.value).order_by(there.c.account_id, there.c.key)
    found = database.read(lambda connection: [tuple(row) for row in connection.execute(query)])
    assert found == [("a", 2, "1"), ('b"\\', 2, "ü"), ("a", 5, "1")]


def test_migrating_again_changes_nothing_and_does_not_load_alembic(bare: Callable[[], Database]) -> None:
    database = bare()
    database.migrate()
    before = database.read(shape)
    database.migrate()
    assert database.read(shape) == before
    assert database.read(migrations.revision) == migrations.HEAD


def test_servers_that_start_at_once_make_the_tables_once(bare: Callable[[], Database]) -> None:
    databases = [bare() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(database.migrate) for database in databases]:
            future.result(30)
    assert databases[0].read(migrations.is_current)


_PROGRAM = """
import sys
from serverless_gpu.ambient import SystemClock
from serverless_gpu.server.db import migrations
from serverless_gpu.server.db.database import Database
database = Database(sys.argv[1], clock=SystemClock())
database.read(lambda connection: connection.closed)
print("there", flush=True)
sys.stdin.readline()
made = migrations._make
migrations._make = lambda connection: (print("made", flush=True), made(connection))
database.migrate()
print(database.read(migrations.revision), flush=True)
database.close()
"""


@pytest.mark.slow
def test_processes_that_start_at_once_make_the_tables_once(bare_url: str, bare: Callable[[], Database]) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, bare_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(said, key=len) == [[migrations.HEAD], [migrations.HEAD], ["made", migrations.HEAD]]
    assert bare().read(migrations.is_current)


def test_a_database_of_a_newer_version_is_refused_and_left_alone(bare: Callable[[], Database]) -> None:
    database = bare()
    database.migrate()
    database.write(lambda connection: connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(ServerProblem, match="newer version") as caught:
        database.migrate()
    assert "9999" in caught.value.message and caught.value.hint
    assert database.read(migrations.revision) == "9999"


def test_a_database_with_tables_of_something_else_is_refused(bare: Callable[[], Database]) -> None:
    database = bare()
    database.write(lambda connection: connection.execute(sa.text("CREATE TABLE runs (id INTEGER)")))
    with pytest.raises(ServerProblem, match="'runs'"):
        database.migrate()
