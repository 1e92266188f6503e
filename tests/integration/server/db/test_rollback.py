"""A database that lost what was acknowledged: noticed at the next start, named, and gone on with only on request."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli import program
from serverless_gpu.errors import NotFound, ServerProblem
from serverless_gpu.node.base.home import Home
from serverless_gpu.server.core.settings import read_settings
from serverless_gpu.server.db import high_water_mark_file
from serverless_gpu.server.db.high_water_mark_file import HighWaterMark, MarkFile, UnreadableMark, read_mark, rollback
from serverless_gpu.server.db.leader_lock import DatabasePosition
from serverless_gpu.server.operations import backup
from serverless_gpu.wire.runs import RunView
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.server.postgres import Cluster
from tests.support.server.rollback import delete_log, has_identity
from tests.support.server.runs_api import request, submit
from tests.support.server.served import Served, served
from tests.support.server.server_process import Process

HERE = DatabasePosition(database_id="a" * 32, generation=2, commits=10, audit=7)


def killed(home: Path) -> str:
    """Run a server, have it acknowledge a run, and kill it; return the run."""
    process = Process(home)
    try:
        wait_for(lambda: has_identity(home), "what the start wrote is in the file itself")
        run = process.connection.ask("POST", "/runs", request(), answer=RunView)
    finally:
        process.end(signal.SIGKILL)
    return run.id


def damage_log(home: Path) -> None:
    with (home / "server" / "server.db-wal").open("r+b") as file:
        file.seek(100)
        file.write(bytes(4096))


def delete_database(home: Path) -> None:
    for end in ("", "-wal", "-shm"):
        (home / "server" / f"server.db{end}").unlink(missing_ok=True)


def empty_mark(home: Path) -> None:
    (home / "server" / "server.db.mark").write_bytes(b"")


@pytest.mark.parametrize("damage", [delete_log, damage_log, delete_database, empty_mark])
def test_22B3_a_server_whose_database_was_rolled_back_does_not_start(
    home: Path, damage: Callable[[Path], None]
) -> None:
    killed(home)
    damage(home)
    with (
        pytest.raises(ServerProblem, match=re.escape(golden("server.rollback.database-rolled-back"))) as caught,
        served(home),
    ):
        pass
    assert (
        golden("server.rollback.sgpu-server-restore") in caught.value.hint and "--accept-rollback" in caught.value.hint
    )
    checked = check()
    assert checked.exit_code == 1
    with pytest.raises(ServerProblem, match=re.escape(golden("server.rollback.database-rolled-back"))), served(home):
        pass


def test_22B3_an_operator_goes_on_without_what_is_lost(home: Path) -> None:
    lost = killed(home)
    delete_log(home)
    with served(home, accept_rollback=True) as server:
        connection = server.connection()
        with pytest.raises(NotFound):
            connection.ask("GET", f"/runs/{lost}", answer=RunView)
        kept = submit(connection).id
        assert any("rollback_accepted" in line for line in audited(server))
    with served(home) as server:
        assert server.connection().ask("GET", f"/runs/{kept}", answer=RunView).id == kept


def test_22B3_a_server_that_was_killed_starts_again(home: Path) -> None:
    kept = killed(home)
    with served(home) as server:
        assert server.connection().ask("GET", f"/runs/{kept}", answer=RunView).id == kept


def test_22B3_a_restored_server_starts_and_goes_on_with_a_mark_of_its_own(home: Path, tmp_path: Path) -> None:
    with served(home) as server:
        submit(server.connection())
        made = backup.back_up(read_settings(home), tmp_path / "backups", clock=SystemClock())
        for _ in range(10):
            submit(server.connection())
    before = read_mark(home / "server" / "server.db.mark")
    shutil.move(home / "server", home / "server.old")
    assert not any(name.endswith(".mark") for name in made.manifest.files)
    backup.restore(Home(home), made.path, nothing_ran_since=False)
    with served(home):
        pass
    after = read_mark(home / "server" / "server.db.mark")
    assert before is not None and after is not None and after.position.commits < before.position.commits
    with served(home):
        pass


def test_22B3_postgresql_a_database_that_is_behind_its_mark_is_refused(
    home: Path, postgres: Cluster, postgres_template: str
) -> None:
    """A standby that lacked the last transactions, or an older dump, under the same address."""
    name = postgres.new_database(postgres_template)
    url = postgres.url(name)
    with served(home, database=url):
        pass
    behind = postgres.new_database(name)
    with served(home, database=url) as server:
        submit(server.connection())
    postgres.drop_database(name)
    with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {behind} RENAME TO {name}".encode())
    with (
        pytest.raises(ServerProblem, match=re.escape(golden("server.rollback.database-rolled-back"))),
        served(home, database=url),
    ):
        pass
    with served(home, database=url, accept_rollback=True):
        pass
    with served(home, database=url):
        pass


def test_22B3_postgresql_another_database_is_no_rollback(home: Path, postgres: Cluster, postgres_template: str) -> None:
    for name in (postgres.new_database(postgres_template), postgres.new_database(postgres_template)):
        with served(home, database=postgres.url(name)):
            pass


def test_22B8_a_server_that_shares_the_directory_of_one_with_another_database_is_refused(
    home: Path, tmp_path: Path, postgres: Cluster, postgres_template: str
) -> None:
    mine, other = (postgres.url(postgres.new_database(postgres_template)) for _ in range(2))
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "server").symlink_to(home / "server")
    with served(home, database=mine) as server:
        mark = read_mark(home / "server" / "database.mark")
        for _ in range(2):  # also where the first try left something behind
            with pytest.raises(ServerProblem, match="with another database") as caught, served(beside, database=other):
                pass
            assert golden("server.rollback.give-one-own") in caught.value.hint
        now = read_mark(home / "server" / "database.mark")  # the server itself writes how far its database has come
        assert mark is not None and now is not None
        assert (now.place, now.position.database_id) == (mark.place, mark.position.database_id)
        with (
            pytest.raises(ServerProblem, match=re.escape(golden("crash.two_servers.another-server-uses"))),
            served(beside, database=mine),
        ):
            pass
        run = submit(server.connection()).id
    with served(beside, database=mine) as server:  # the other one has ended: this one replaces it
        assert server.connection().ask("GET", f"/runs/{run}", answer=RunView).id == run


def test_22B8_a_server_with_sqlite_shares_its_directory_with_nobody(home: Path, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "server").symlink_to(home / "server")
    with served(home):
        for file in (home / "server" / "server.db", tmp_path / "other.db"):
            with pytest.raises(ServerProblem, match="is already running"), served(beside, database=f"sqlite:///{file}"):
                pass


def test_22B10_files_of_runs_that_the_database_does_not_know_are_named(home: Path) -> None:
    with served(home):
        pass
    lost, placed = "01kaz5w8000000000000000000", "01kaz5w8000000000000000001"
    (home / "server" / "logs" / lost / "1").mkdir(parents=True)
    (home / "server" / "gangs").mkdir(exist_ok=True)
    (home / "server" / "gangs" / f"{placed}:1").touch()
    checked = check()
    assert checked.exit_code == 1 and lost in checked.output and placed in checked.output
    with served(home) as server:
        known = submit(server.connection()).id
        (home / "server" / "logs" / known / "1").mkdir(parents=True)
    log = (home / "server" / "server.log").read_text()
    assert lost in log and placed in log
    assert known not in check().output


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (HERE, ""),
        (DatabasePosition(database_id="a" * 32, generation=3, commits=11, audit=9), ""),
        (DatabasePosition(database_id="a" * 32, generation=2, commits=9, audit=7), "the database ends at commit 9"),
        (DatabasePosition(database_id="a" * 32, generation=1, commits=10, audit=7), "generation 1"),
        (DatabasePosition(database_id="a" * 32, generation=3, commits=11, audit=6), "audit row 6"),
        (
            DatabasePosition(database_id="b" * 32, generation=9, commits=90, audit=70),
            "the current database is bbbbbbbb",
        ),
        (None, "current database is empty"),
    ],
)
def test_22B3_a_database_is_compared_with_its_mark(found: DatabasePosition | None, said: str) -> None:
    mark = HighWaterMark(position=HERE, at_ns=1)
    assert rollback(None, found) == ""
    assert said in rollback(mark, found) and bool(said) == bool(rollback(mark, found))


def test_22B3_a_mark_survives_a_torn_write_and_never_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "mark"
    mark = MarkFile(path, HERE, now_ns=1)
    mark.commit(11)
    mark.commit(9)
    mark.sync(audit=8, now_ns=2)
    mark.commit(12)
    mark.close()
    found = read_mark(path)
    assert found is not None and (found.position.commits, found.position.audit) == (12, 8)
    whole = path.read_bytes()
    size = len(whole) // 2
    torn = [whole[:10] + bytes(size - 10) + whole[size:], whole[:size] + whole[size : size + 10] + bytes(size - 10)]
    there = []
    for data in torn:
        path.write_bytes(data)
        left = read_mark(path)
        assert left is not None
        there.append(left.position.commits)
    assert sorted(there) == [11, 12]
    path.write_bytes(bytes(2 * size))
    with pytest.raises(UnreadableMark):
        read_mark(path)
    assert read_mark(tmp_path / "none") is None
    assert high_water_mark_file.SYNC_S <= 1


def check() -> Result:
    """Run `sgpu server check` in the test's home."""
    return CliRunner().invoke(program.sgpu, ["server", "check"], prog_name="sgpu")


def audited(server: Served) -> list[str]:
    """Return the details of the audit."""
    with contextlib.closing(sqlite3.connect(server.home / "server" / "server.db")) as connection:
        return [detail for (detail,) in connection.execute("SELECT detail_json FROM audit")]
