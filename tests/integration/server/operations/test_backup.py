"""Backups: whole while the server works, cheap after the first, refused when altered; and a server made out of one."""

from __future__ import annotations

import fcntl
import re
import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.client.remote.event_stream import StreamCursor
from serverless_gpu.errors import InvalidValue, NotFound, ServerProblem, StorageError
from serverless_gpu.model.lifecycle.attempt import TERMINAL, Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, Forgotten, GivenUp, UserCodeStarted
from serverless_gpu.node.base.home import Home
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.operations import backup
from serverless_gpu.server.operations.backup import (
    DATABASE,
    MANIFEST,
    RESTORED,
    RestoreMark,
    read_manifest,
    restore,
    verify,
)
from serverless_gpu.server.records import audit, orders
from serverless_gpu.wire.agents import Ending, File, Report
from serverless_gpu.wire.nodes import PoolRequest, PoolView
from serverless_gpu.wire.runs import EndedMessage, LogMessage, RunView, StateMessage, StreamMessage
from tests.support.golden import golden
from tests.support.server.backups import S, backup_of, going_on, line
from tests.support.server.measures import value
from tests.support.server.played import Played
from tests.support.server.postgres import Cluster
from tests.support.server.runs_api import Reader, submit
from tests.support.server.served import Served, served
from tests.support.server.stored import T0, add_node, add_people, add_run, place, stored, tell


def waiting_run(server: Served) -> str:
    """Return a run that waits for a node that does not come."""
    server.connection().ask("PUT", "/pools/none", PoolRequest(kind="on-demand"), answer=PoolView)
    return submit(server.connection(), pool="none", wait=True).id


def view(server: Served, run_id: str) -> RunView:
    return server.connection().ask("GET", f"/runs/{run_id}", answer=RunView)


def test_a_server_goes_on_from_a_backup_that_was_made_while_it_worked(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    (home / "server.toml").write_text("runs_waiting = 7\n")
    with served(home) as server:
        node, start, running = going_on(server)
        waiting = waiting_run(server)
        token = (home / "server" / "token").read_text()
        made = backup_of(home, tmp_path / "backups")
        later = waiting_run(server)
        node.report(start, Report(state=State.STOPPING, world_size=1, exec_ns=5, logs=(line(7, b"after\n"),)))
        reader = Reader(server.connection().stream("GET", f"/runs/{running}/events", answer=StreamMessage))
        reader.until(LogMessage)
        server.stop()
        seen = max(message.seq for message in reader.all() if isinstance(message, StateMessage))
    assert verify(made.path) == made.manifest
    restore(Home(other), made.path, nothing_ran_since=False)
    assert (other / "server.toml").read_text() == "runs_waiting = 7\n"
    with served(other) as server:
        assert (other / "server" / "token").read_text() == token
        lost = view(server, waiting)
        assert (lost.state, lost.reason) == (State.LOST, Reason.SERVER_RESTORED)
        assert made.path.name in lost.sentence
        with pytest.raises(NotFound):
            view(server, later)
        assert view(server, running).state is State.RUNNING
        query = {"after": str(seen + 3), "offsets": "1.0.stdout:13"}  # it has seen what this server never knew
        ahead = server.connection().stream("GET", f"/runs/{running}/events", answer=StreamMessage, query=query)
        reader = Reader(ahead)
        answer = Played(server).report(start, Report(state=State.STOPPING, logs=(line(13, b"end\n"),)))
        assert not answer.stale and answer.offsets == {"0.stdout": 7}  # the node has the rest, and sends it again
        ending = Ending(state=State.SUCCEEDED, reason=Reason.COMPLETED, began=True, stopped=msgspec.Raw(b"{}"))
        rest = line(7, b"after\nend\n")
        result = File(name="results/0.pkl", size=3, inline=b"abc")
        Played(server).report(start, Report(state=State.STOPPING, logs=(rest,), files=(result,), ending=ending))
        Played(server).report(start, Report(state=State.STOPPING, receipt=msgspec.Raw(b"{}")))
        messages = reader.all()
        assert b"".join(m.data for m in messages if isinstance(m, LogMessage)) == b"end\n"
        assert [m.state for m in messages if isinstance(m, EndedMessage)] == [State.SUCCEEDED]
        taken = StreamCursor()
        taken.after = seen + 3
        assert [m for m in messages if isinstance(m, EndedMessage)] == [
            taken.take(m) for m in messages if isinstance(m, EndedMessage)
        ]
    assert not (other / "server" / RESTORED).exists()


def test_a_server_that_moves_to_another_machine_keeps_its_queue(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    with served(home) as server:
        waiting = waiting_run(server)
    made = backup_of(home, tmp_path / "backups")  # without a server that runs
    restore(Home(other), made.path, nothing_ran_since=True)
    with served(other) as server:
        assert view(server, waiting).state is State.QUEUED


def test_a_second_backup_links_what_is_as_it_was_and_outlives_the_first(tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    with served(tmp_path / "home") as server:
        _node, _start, running = going_on(server)
        first = backup_of(server.home, backups)
        output = f"server/logs/{running}/1/0.stdout"
        with (server.home / output).open("ab") as file:
            file.write(b"more\n")
        second = backup_of(server.home, backups)
    assert first.linked == 0
    copied = {name for name in second.manifest.files if (second.path / name).stat().st_nlink == 1}
    assert copied == {DATABASE, output}
    assert second.linked == len(second.manifest.files) - 2
    shutil.rmtree(first.path)
    assert verify(second.path).files[output].size == len(b"before\nmore\n")
    third = backup_of(server.home, backups)
    assert third.linked == len(third.manifest.files) - 1


def test_what_is_of_the_process_is_not_in_it_and_only_its_user_may_read_it(tmp_path: Path) -> None:
    with served(tmp_path / "home") as server:
        (server.home / "server" / "incoming").mkdir(exist_ok=True)
        (server.home / "server" / "incoming" / "half").write_bytes(b"x")
        (server.home / "server" / "nearby" / "packs").mkdir(parents=True)
        (server.home / "server" / "nearby" / "packs" / ("a" * 64)).write_bytes(b"a copy of what is in the bucket")
        made = backup_of(server.home, tmp_path / "backups")
    assert set(made.manifest.files) == {DATABASE, "server/key", "server/token", "server/node.token"}
    modes = {stat.S_IMODE((made.path / name).stat().st_mode) for name in made.manifest.files}
    assert (modes, stat.S_IMODE(made.path.stat().st_mode)) == ({0o600}, 0o700)


def test_what_an_ended_backup_left_is_removed_and_two_at_once_are_refused(tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    with served(tmp_path / "home") as server:
        (backups / ".partial-2026-01-01T00-00-00Z" / "server").mkdir(parents=True)
        made = backup_of(server.home, backups)
        assert sorted(path.name for path in backups.iterdir()) == [".lock", made.path.name]
        with (backups / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(ServerProblem, match=re.escape(golden("server.backups.another-backup-being"))):
                backup_of(server.home, backups)
    with pytest.raises(ServerProblem, match="has no server"):
        backup_of(tmp_path / "nothing", backups)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.parametrize("name", [DATABASE, "server/key", "server/token"])
def test_a_backup_that_was_altered_is_refused_by_the_name_of_its_file(tmp_path: Path, name: str) -> None:
    with served(tmp_path / "home") as server:
        made = backup_of(server.home, tmp_path / "backups")
    _flip(made.path / name)
    other = tmp_path / "other"
    with pytest.raises(InvalidValue, match=golden("server.backups.backed-up", name=name)):
        verify(made.path)
    with pytest.raises(InvalidValue, match=golden("server.backups.backed-up", name=name)):
        restore(Home(other), made.path, nothing_ran_since=False)
    assert [path.name for path in other.iterdir()] == ["server.lock"]
    (made.path / name).unlink()
    with pytest.raises(InvalidValue, match="cannot be read"):
        verify(made.path)


def test_what_is_no_backup_and_a_home_with_a_server_are_refused(tmp_path: Path) -> None:
    with served(tmp_path / "home") as server:
        made = backup_of(server.home, tmp_path / "backups")
        before = (server.home / "server" / "key").read_bytes()
        with pytest.raises(ServerProblem, match="is already running: process") as refused:
            restore(Home(server.home), made.path, nothing_ran_since=False)
        assert "stop the server first" in refused.value.hint
    with pytest.raises(ServerProblem, match=re.escape(golden("server.backups.server-already"))) as refused:
        restore(Home(server.home), made.path, nothing_ran_since=False)
    assert golden("server.backups.stop-server-first") in refused.value.hint
    assert (server.home / "server" / "key").read_bytes() == before
    with pytest.raises(InvalidValue, match="is not a valid backup"):
        restore(Home(tmp_path / "other"), tmp_path, nothing_ran_since=False)
    outside = msgspec.structs.replace(made.manifest, files={"../x": made.manifest.files["server/key"]})
    (made.path / MANIFEST).write_bytes(msgspec.json.encode(outside))
    with pytest.raises(InvalidValue, match="outside of the backup"):
        read_manifest(made.path)


def test_a_backup_is_not_made_of_itself_and_a_full_disk_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path / "home") as server:
        before = sorted((server.home / "server").iterdir())
        (tmp_path / "link").symlink_to(server.home / "server")
        for directory in (server.home / "server" / "backups", tmp_path / "link" / "backups", server.home / "server"):
            with pytest.raises(ServerProblem, match=re.escape(golden("server.backups.backed-up-2"))):
                backup_of(server.home, directory)
        assert sorted((server.home / "server").iterdir()) == before

        def full(_source: Path, target: Path) -> None:
            raise OSError(28, "No space left on device", str(target))

        monkeypatch.setattr(backup, "_copy_file", full)
        with pytest.raises(StorageError, match=re.escape(golden("rows.full_disk_mid_run.space-left-device"))):
            backup_of(server.home, tmp_path / "backups")
    assert [path.name for path in (tmp_path / "backups").iterdir()] == [".lock"]


def test_a_home_has_no_second_server_when_the_directory_of_a_living_one_was_moved(tmp_path: Path) -> None:
    with served(tmp_path / "home") as server:
        made = backup_of(server.home, tmp_path / "backups")
        (server.home / "server").rename(server.home / "server.old")
        with pytest.raises(ServerProblem, match="is already running: process"):
            restore(Home(server.home), made.path, nothing_ran_since=False)
        with pytest.raises(ServerProblem, match="is already running: process"), served(server.home):
            pass
        assert not (server.home / "server").exists()
    restore(Home(server.home), made.path, nothing_ran_since=False)
    with served(server.home):
        pass


@pytest.mark.parametrize("end", ["", "-wal", "-journal"])
def test_what_sqlite_left_of_another_database_is_not_applied_to_the_restored_one(tmp_path: Path, end: str) -> None:
    with served(tmp_path / "home") as server:
        made = backup_of(server.home, tmp_path / "backups")
    other, database = tmp_path / "other", tmp_path / "disk" / "runs.db"
    for directory in (other, database.parent):
        directory.mkdir()
    (other / "server.toml").write_text(f"database = 'sqlite:///{database}'\n")
    left = database.with_name(f"runs.db{end}")
    left.write_bytes(b"of another one")
    with pytest.raises(ServerProblem, match=golden("server.backups.runs-db-already", end=end)) as refused:
        restore(Home(other), made.path, nothing_ran_since=False)
    assert refused.value.hint == f"mv {left} {database}.old{end}"
    assert not (other / "server").exists() and left.read_bytes() == b"of another one"
    left.unlink()
    restore(Home(other), made.path, nothing_ran_since=False)
    assert database.exists()


def test_of_a_server_on_postgresql_the_files_are_backed_up(tmp_path: Path, postgres: Cluster) -> None:
    (tmp_path / "home").mkdir()
    database = postgres.url(postgres.new_database())
    (tmp_path / "home" / "server.toml").write_text(f"database = {database!r}\n")
    with served(tmp_path / "home") as server:
        waiting = waiting_run(server)
        made = backup_of(server.home, tmp_path / "backups")
    assert made.manifest.database == "postgresql" and DATABASE not in made.manifest.files
    restore(Home(tmp_path / "other"), made.path, nothing_ran_since=False)
    with served(tmp_path / "other") as server:
        assert view(server, waiting).reason is Reason.SERVER_RESTORED


# --- what becomes of runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def people(database: Database) -> Database:
    """Return a database with somebody and a node."""
    add_people(database, "alice")
    add_node(database)
    return database


def settled(
    database: Database, directory: Path, *, nothing_ran_since: bool = False, at_ns: int = T0 + 9 * S
) -> ServerMetrics:
    """Let a server start on a database that was restored; return what it counted."""
    mark = RestoreMark(made_ns=T0, nothing_ran_since=nothing_ran_since)
    (directory / RESTORED).write_bytes(msgspec.json.encode(mark))
    measures = ServerMetrics()
    backup.settle(database, directory, measures=measures, now_ns=at_ns)
    assert not (directory / RESTORED).exists()
    return measures


def test_what_waits_is_lost_and_counted(people: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "AT_ONCE", 2)
    waiting = [add_run(people) for _ in range(5)]
    going = [add_run(people, resume=True) for _ in range(3)]
    for run_id in going:
        place(people, run_id)
    measures = settled(people, tmp_path)
    assert value(measures, "sgpu_runs_ended_total", reason="server_restored") == 5
    assert {(stored(people, run_id).state, stored(people, run_id).reason) for run_id in waiting} == {
        (State.LOST, Reason.SERVER_RESTORED)
    }
    assert {stored(people, run_id).state for run_id in going} == {State.STARTING}
    (entry,) = people.read(audit.entries)
    assert (entry.action, entry.detail["waited"], entry.detail["went_on"]) == ("server.restore", 5, 3)
    backup.settle(people, tmp_path, measures=measures, now_ns=T0 + 10 * S)  # of the next start
    assert len(people.read(audit.entries)) == 1


@pytest.mark.parametrize("event", [GivenUp(Reason.NODE_GONE), GivenUp(Reason.NODE_REBOOTED), Forgotten()])
@pytest.mark.parametrize("began", [False, True])
def test_what_went_on_gets_no_other_attempt_whatever_its_user_allows(
    people: Database, tmp_path: Path, event: GivenUp | Forgotten, began: bool
) -> None:
    run_id = add_run(people, resume=True, retries=3)
    place(people, run_id)
    if began:
        tell(people, run_id, UserCodeStarted())
    settled(people, tmp_path)
    assert people.read(lambda connection: orders.waiting(connection, "node-1")) == []
    tell(people, run_id, event)
    assert stored(people, run_id).state in TERMINAL


def test_what_went_on_ends_as_its_node_says(people: Database, tmp_path: Path) -> None:
    run_id = add_run(people, retries=3)
    place(people, run_id)
    settled(people, tmp_path)
    settled(people, tmp_path, at_ns=T0 + 20 * S)  # killed before the mark was removed
    tell(people, run_id, UserCodeStarted(), AttemptEnded(Reason.COMPLETED, began=True))
    assert stored(people, run_id).state is State.SUCCEEDED


def test_who_knows_that_nothing_ran_since_keeps_everything(people: Database, tmp_path: Path) -> None:
    waiting, going = add_run(people), add_run(people, resume=True)
    place(people, going)
    settled(people, tmp_path, nothing_ran_since=True)
    assert stored(people, waiting).state is State.QUEUED
    assert len(people.read(lambda connection: orders.waiting(connection, "node-1"))) == 1
    tell(people, going, Forgotten())
    assert stored(people, going).state is State.QUEUED
