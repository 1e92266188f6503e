"""Recognises a database that was rolled back, and refuses to start on it.

    start            ─▶ mark against database ─▶ behind: refused, with the way back and the way on
    --accept-rollback ─▶ restored.json ─▶ as after a restore: what waits is LOST, nothing runs twice

A server that goes on from a rolled back database would start runs again that have ended since, and tell everyone else
that theirs never were. So it does not start until a person has decided.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import ServerProblem
from serverless_gpu.model.high_water_mark import HighWaterMark, rollback
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.server.core.server_key import sha256
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db import high_water_mark_file, leader_lock
from serverless_gpu.server.operations import restore
from serverless_gpu.server.operations.backup import file_of
from serverless_gpu.server.storage import storage

Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""`Database.read`."""


def mark_path(settings: Settings) -> Path | None:
    """Return where the high-water mark is; None for a database in memory."""
    url = sa.make_url(settings.database)
    if url.get_backend_name() != "sqlite":
        return settings.directory / "database.mark"
    file = file_of(settings)
    return None if file is None else file.with_name(f"{file.name}.mark")


def place_of(settings: Settings) -> str:
    """Return what a mark remembers a database's place by, where the mark does not lie beside it."""
    url = sa.make_url(settings.database)
    if url.get_backend_name() == "sqlite":
        return ""
    bare = url.set(username=None, password=None).difference_update_query(["password", "user"])
    return sha256(bare.render_as_string())[:16]


def sentence(settings: Settings, read: Read) -> str:
    """Return how the database was rolled back, or "" where it was not as far as anyone can know.

    Raises:
        ServerUnavailable: the database does not answer.
    """
    path = mark_path(settings)
    if path is None or (settings.directory / restore.FILE).exists():  # a restore goes back on purpose
        return ""
    mark: HighWaterMark | None
    try:
        mark = high_water_mark_file.read_mark(path)  # before the database, which is ahead of it then
    except high_water_mark_file.UnreadableMark:
        return f"its high-water mark {path} is damaged ({path.stat().st_size} bytes), so the disk lost writes"
    return rollback(mark, read(leader_lock.position), place=place_of(settings))


def refuse(settings: Settings, read: Read, *, now_ns: int, other: str = "") -> str:
    """Refuse to start on a database that was rolled back, unless the operator accepts that.

    Args:
        settings: the server's.
        read: reads the database.
        now_ns: nanoseconds since 1970.
        other: which process shares the server's directory, or "".

    Returns:
        How it was rolled back, where that is accepted; else "".

    Raises:
        ServerProblem: it was rolled back; or that is accepted, and the database is damaged besides; or another server
            shares the directory and has another database.
    """
    if other and not _is_same_database(settings, read):
        hint = "servers share a directory only where they have the same database; give this one its own home"
        raise ServerProblem(f"{other}, with another database", hint=hint)
    why = sentence(settings, read)
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
    restored = restore.RestoreMark(made_ns=now_ns, nothing_ran_since=False, rolled_back=True)
    write_private(settings.directory / restore.FILE, msgspec.json.encode(restored))
    return why


def evidence(settings: Settings, read: Read) -> tuple[str, ...]:
    """Return everything that says that a database lost what it had.

    Args:
        settings: the server's.
        read: reads the database.
    """
    why = sentence(settings, read)
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
