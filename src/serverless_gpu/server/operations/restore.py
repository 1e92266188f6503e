"""Restores a server from a backup, and detects a database that was rolled back.

    sgpu server restore ─▶ files, each checked ─▶ restored.json ─▶ home/server gets its name
    sgpu up ─▶ restored.json? ─▶ every run that had not ended, once ─▶ audit ─▶ the mark is removed ─▶ loops

Between backup and restore the server went on. A run that waits in the backup may have run and ended since; one that
runs there may have ended, or gone on as another attempt. Nodes forget what the server confirmed, so no part knows. So
nothing that the backup knows is started again:

    waits      LOST, `server_restored`: its owner submits it again if it did not run
    goes on    stays as it is. If its node still looks after it, its reports come and it goes on to its end; if not, it
               is LOST when its lease has run out. Its order is not sent again, and it gets no other attempt
    came since is not known: its node hears that it is over, and its owner that there is no such run

User code runs once, also then, and a fence that was given since the backup is never given again. With
`nothing_ran_since` (a server that was drained and stopped before the backup, to move to another machine) everything
goes on as after any restart.

A server that goes on from a rolled back database would start runs again that have ended since. Therefore it does not
start until an operator has decided:

    start             ─▶ high-water mark against database ─▶ behind: refused, with both ways out
    --accept-rollback ─▶ restored.json ─▶ as after a restore: what waits is LOST, nothing runs twice

Failure cases:
- Files are not what was backed up, the home has a server, or a server runs whose directory was moved away: refused,
  nothing is changed.
- Killed on the way: the home has no server, or all of it. Settled runs stay so; the next start settles the rest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.errors import ServerProblem
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.run_lifecycle import Restored
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import write_private
from serverless_gpu.server.core.server_key import sha256
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings, read_settings
from serverless_gpu.server.db import high_water_mark_file, leader_lock
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.db.high_water_mark_file import HighWaterMark, rollback
from serverless_gpu.server.http.listener import lock_home
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Note, TransitionResult
from serverless_gpu.server.operations.backup import DATABASE, Manifest, check, copy, file_of, name_of, read_manifest
from serverless_gpu.server.records import audit, orders, runs
from serverless_gpu.server.records.audit import SERVER, Action
from serverless_gpu.server.storage import storage

FILE = "restored.json"
AT_ONCE = 200
_BESIDE = ("-wal", "-shm", "-journal")
Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""`Database.read`."""


class RestoreMark(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `restored.json`."""

    made_ns: int  # when the backup was made, nanoseconds since 1970
    nothing_ran_since: bool  # whether the server did not run after it
    rolled_back: bool = False
    """There was no backup: the database itself had lost its end, and the operator accepts that."""


def restore(home: Home, backup: Path, *, nothing_ran_since: bool) -> Manifest:
    """Restore a backup into a home without a server."""
    manifest = read_manifest(backup)
    directory = home.root / "server"
    with lock_home(directory, hint="stop it first: Ctrl-C where `sgpu up` runs, or its service"):
        if directory.exists() and any(directory.iterdir()):
            hint = (
                "another SERVERLESS_GPU_HOME; or, when what is there is not needed: "
                f"stop the server first, then mv {directory} {directory}.old"
            )
            raise ServerProblem(f"{home.root} has a server already", hint=hint)
        _bring(home, backup, manifest, nothing_ran_since=nothing_ran_since)
    return manifest


def settle(database: Transactions, directory: Path, *, measures: ServerMetrics, now_ns: int) -> None:
    """Settle the runs that had not ended in the backup; does nothing unless the server was restored."""
    path = directory / FILE
    try:
        mark = from_json(path.read_bytes(), RestoreMark)
    except FileNotFoundError:
        return
    except msgspec.MsgspecError as error:
        raise ServerProblem(f"{path} cannot be understood: {error}", hint="restore the backup again") from error
    moment = name_of(mark.made_ns)
    detail = f"the database was rolled back, found {moment}" if mark.rolled_back else f"the backup is of {moment}"
    counts = {"waited": 0, "went_on": 0}
    if not mark.nothing_ran_since:
        while lost := database.write(lambda connection: _lose_waiting(connection, detail, now_ns)):
            counts["waited"] += len(lost)
            for told in lost:
                told.count(measures)
        while held := database.write(lambda connection: _hold(connection, now_ns)):
            counts["went_on"] += held
    said: dict[str, object] = {"backup": moment, "nothing_ran_since": mark.nothing_ran_since, **counts}
    if mark.rolled_back:
        said = {"rollback_accepted": moment, **counts}
    database.write(
        lambda connection: audit.record(
            connection, who=SERVER, action=Action.SERVER_RESTORE, subject="server", now_ns=now_ns, detail=said
        )
    )
    faults.reach("after_restore_is_settled")
    path.unlink()


def _bring(home: Home, backup: Path, manifest: Manifest, *, nothing_ran_since: bool) -> None:
    """Copy everything to a partial directory, check it, and move it into place."""
    partial = home.root / ".server-restoring"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "server").mkdir(mode=0o700, parents=True)
    partial.chmod(0o700)
    try:
        for name, entry in manifest.files.items():
            target = partial / name
            copy(backup / name, target)
            check(target, entry)
        _place(home, partial, manifest, nothing_ran_since=nothing_ran_since)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _place(home: Home, partial: Path, manifest: Manifest, *, nothing_ran_since: bool) -> None:
    """Move everything into place; the server's directory last."""
    configuration = home.root / "server.toml"
    if (partial / "server.toml").exists() and not configuration.exists():
        (partial / "server.toml").rename(configuration)
    made = partial / "server"
    made.chmod(0o700)
    if manifest.database == "sqlite":
        place = file_of(read_settings(home.root, environ=os.environ))
        if place is None:
            hint = f"the backup's database is {DATABASE} in it; take `database` out of {configuration}"
            raise ServerProblem("the backup has a database of SQLite, and the settings say PostgreSQL", hint=hint)
        inside = place.parent == home.root / "server"
        target = made / place.name if inside else place
        _require_nothing(target)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.move(partial / DATABASE, target)
    mark = RestoreMark(made_ns=manifest.made_ns, nothing_ran_since=nothing_ran_since)
    (made / FILE).write_bytes(msgspec.json.encode(mark))
    os.sync()
    faults.reach("before_restored_is_named")
    made.rename(home.root / "server")
    os.sync()


def _require_nothing(target: Path) -> None:
    """Refuse where a database is, or what SQLite writes beside one: it would be applied to the restored one."""
    there = [path for end in ("", *_BESIDE) if (path := target.with_name(f"{target.name}{end}")).exists()]
    if there:
        hint = "; ".join(f"mv {path} {target}.old{path.name.removeprefix(target.name)}" for path in there)
        raise ServerProblem(f"{there[0]} is there already", hint=hint)


def _lose_waiting(connection: sa.Connection, detail: str, now_ns: int) -> list[TransitionResult]:
    waiting = [run_id for run_id, _fence in runs.queue(connection)][:AT_ONCE]
    note = Note(at_ns=now_ns, detail=detail)
    return [transitions.apply(connection, run, Restored(), note=note) for run in runs.find_many(connection, waiting)]


def _hold(connection: sa.Connection, now_ns: int) -> int:
    held = [run for run in runs.active(connection) if run.restored_ns is None or run.restored_ns < now_ns][:AT_ONCE]
    runs.hold(connection, [run.id for run in held], at_ns=now_ns)
    for run in held:
        if run.attempt is not None:
            for crew in run.attempt.crews:
                orders.take_starts(connection, crew.node_id, [(run.id, run.fence)], at_ns=now_ns)
    return len(held)


def mark_path(settings: Settings) -> Path | None:
    """Return where the high-water mark is; None for a database in memory."""
    url = sa.make_url(settings.database)
    if url.get_backend_name() != "sqlite":
        return settings.directory / "database.mark"
    file = file_of(settings)
    return None if file is None else file.with_name(f"{file.name}.mark")


def place_of(settings: Settings) -> str:
    """Return the key of a database's place in a mark, where the mark does not lie beside it."""
    url = sa.make_url(settings.database)
    if url.get_backend_name() == "sqlite":
        return ""
    bare = url.set(username=None, password=None).difference_update_query(["password", "user"])
    return sha256(bare.render_as_string())[:16]


def rollback_sentence(settings: Settings, read: Read) -> str:
    """Return how the database was rolled back, or "" without a sign of it."""
    path = mark_path(settings)
    if path is None or (settings.directory / FILE).exists():  # a restore goes back on purpose
        return ""
    mark: HighWaterMark | None
    try:
        mark = high_water_mark_file.read_mark(path)  # before the database, which is ahead of it then
    except high_water_mark_file.UnreadableMark:
        return f"its high-water mark {path} is damaged ({path.stat().st_size} bytes), so the disk lost writes"
    return rollback(mark, read(leader_lock.position), place=place_of(settings))


def refuse_rollback(settings: Settings, read: Read, *, now_ns: int, other: str = "") -> str:
    """Refuse to start on a database that was rolled back, unless the operator accepts that.

    Return how it was rolled back where that is accepted, else "". `other` names a process that shares the server's
    directory.
    """
    if other and not _is_same_database(settings, read):
        hint = "servers share a directory only where they have the same database; give this one its own home"
        raise ServerProblem(f"{other}, with another database", hint=hint)
    why = rollback_sentence(settings, read)
    if not why:
        return ""
    if not settings.accept_rollback:
        directory = settings.directory
        hint = (
            f"restore a backup: mv {directory} {directory}.old && sgpu server restore BACKUP. Or go on without what is "
            "lost: sgpu up --accept-rollback; runs that wait in it become LOST, since they may have run"
        )
        raise ServerProblem(f"the database was rolled back: {why}", hint=hint)
    _require_whole(file_of(settings))
    restored = RestoreMark(made_ns=now_ns, nothing_ran_since=False, rolled_back=True)
    write_private(settings.directory / FILE, msgspec.json.encode(restored))
    return why


def rollback_evidence(settings: Settings, read: Read) -> tuple[str, ...]:
    """Return the signs that a database lost data."""
    why = rollback_sentence(settings, read)
    unknown = storage.orphan_runs(settings.directory, read)
    return (
        *([f"the database was rolled back: {why}"] if why else []),
        *([storage.orphan_sentence(unknown, settings.directory)] if unknown else []),
    )


def _is_same_database(settings: Settings, read: Read) -> bool:
    path = mark_path(settings)
    try:
        mark = None if path is None else high_water_mark_file.read_mark(path)
    except high_water_mark_file.UnreadableMark:
        return True  # that is refused besides
    found = read(leader_lock.position)
    return mark is None or (found is not None and found.database_id == mark.position.database_id)


def _require_whole(path: Path | None) -> None:
    """Refuse to go on with a file from which a part of a checkpoint is missing."""
    if path is None:
        return
    with contextlib.closing(sqlite3.connect(path)) as connection:
        try:
            (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            said = str(error)
    if said != "ok":
        raise ServerProblem(
            f"the database was rolled back, and {path} is damaged: {said}", hint="restore a backup: it cannot go on"
        )
