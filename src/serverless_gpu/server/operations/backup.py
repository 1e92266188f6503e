"""Backs up a server, restores it from a backup, and detects a database that was rolled back.

    DIRECTORY/2026-11-22T10-20-31Z/
        manifest.json          list of the files, with sizes and digests
        server.toml            of the home, if it exists
        database.db            a snapshot of the database; nothing for PostgreSQL: run pg_dump first
        server/…               key, tokens, output of ranks, parts, environments

    sgpu server backup  ─▶ database in one reading transaction ─▶ files ─▶ manifest ─▶ the directory gets its name
    sgpu server restore ─▶ files, each checked ─▶ restored.json ─▶ home/server gets its name
    sgpu up             ─▶ high-water mark against database ─▶ behind: refused, with both remedies
                        ─▶ restored.json? ─▶ every unended run, once ─▶ audit ─▶ the mark is removed ─▶ loops

Backup. The server keeps running during a backup. The server writes each file before the database row that names the
file. The backup copies the database before the files. The copied files therefore include every file that the copied
database names. Unchanged files become hard links to their copies in the previous backup. A daily backup therefore needs
disk space only for one day's changes. The next backup removes the partial files of an interrupted backup.

Restore. After the backup, the server may have started or ended runs. A restored server cannot find out the current
state of unended runs, because nodes delete confirmed reports. The restored server therefore starts no unended run
again:

    waits      LOST, `server_restored`: the owner submits the run again if it did not run
    runs       unchanged. If its node still runs the attempt, the node's reports arrive and the run continues
               to its end. Otherwise the run is LOST when its lease expires. The server does not send its order
               again, and creates no other attempt
    new since  unknown: the server reports to the node that the run ended, and to the owner that no such run exists

A restore executes no user code twice. The server never reuses a fence that it assigned after the backup. With
`nothing_ran_since`, all runs continue as after a restart. The option `nothing_ran_since` serves to move a server to
another machine. Before the move, the operator must drain and stop the server and make a backup.

Rollback. A server with a rolled-back database would run ended runs a second time. The server therefore refuses to start
until an operator restores a backup or accepts the data loss (`--accept-rollback`). With `--accept-rollback`, the server
writes `restored.json` as after a restore. All waiting runs of a rolled-back database become LOST, so that no run
executes twice.

Failure cases:

* If the disk is too full for a backup, the backup command removes its partial copy. Earlier backups stay unchanged.

* If a file disappears during the copy, the backup omits the file, because its run ended long ago.

* A backup was altered: `verify` and a restore name the first altered file.

* If the target already has a server directory, the restore changes nothing. If an operator has renamed a running
  server's directory, the restore also changes nothing.

* After a killed restore, the target has either no server or a complete server. The next start of the server settles the
  remaining unended runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from blake3 import blake3

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, ServerProblem, StorageError
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.run_lifecycle import Restored
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.base.requirements import lock_error
from serverless_gpu.server.core.server_key import sha256
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings, read_settings
from serverless_gpu.server.db import high_water_mark_file, leader_lock
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.db.high_water_mark_file import HighWaterMark, rollback
from serverless_gpu.server.http.listener import lock_home
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Note, TransitionResult
from serverless_gpu.server.records import audit, orders, runs
from serverless_gpu.server.records.audit import SERVER, Action
from serverless_gpu.server.storage import server_stores
from serverless_gpu.version import __version__

MANIFEST = "manifest.json"
DATABASE = "database.db"
RESTORED = "restored.json"
LAST_BACKUP = "last_backup.json"
"""File of the server's directory that describes the last backup."""
VERIFIED = "verified.json"
"""File of a backup with the result of its last verification."""
"""Name of the file that exists from a restore until the server has settled the restored runs."""
AT_ONCE = 200
"""Maximum number of runs that the server settles in one transaction."""
_VERSION = 1
_PIECE = 1 << 20
_PARTIAL = ".partial-"
# Temporary files, and files of one process or machine, which a restore does not need.
_LEFT_OUT = frozenset({"lock", "certificate.json", "node.json", RESTORED, LAST_BACKUP, "incoming", "nearby"})
_BESIDE = ("-wal", "-shm", "-journal")
_ENDS_LEFT_OUT = (".lock", ".tmp", ".log", ".reserve", ".mark", *_BESIDE)
Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""Signature of `Database.read`."""


class BackupFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in a backup, with original mode and modification time (nanoseconds since 1970)."""

    size: int
    blake3: str
    mode: int
    changed_ns: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a backup."""

    version: int  # Version of the manifest format.
    made_ns: int  # Time before the copy of the database, in nanoseconds since 1970.
    program: str  # Version of serverless-gpu that made the backup.
    database: str  # Kind of database: sqlite or postgresql.
    files: Mapping[str, BackupFile]  # Files by path in the backup.


class FinishedBackup(msgspec.Struct, frozen=True, kw_only=True):
    """A finished backup."""

    path: Path
    manifest: Manifest
    linked: int  # Number of files that are hard links to the previous backup.


class BackupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `last_backup.json`."""

    path: str
    made_ns: int  # Time before the copy of the database, in nanoseconds since 1970.
    files: int
    bytes: int
    has_database: bool  # False for PostgreSQL, which an operator must dump.


class VerificationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `verified.json`."""

    at_ns: int
    problem: str = ""  # Reason why the backup is unusable, or "".


class RestoreMark(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `restored.json`."""

    made_ns: int  # Time of the backup, in nanoseconds since 1970.
    nothing_ran_since: bool  # True if the server did not run after the backup.
    rolled_back: bool = False
    """True if the operator accepted a rolled-back database instead of restoring a backup."""


# --- backup ---------------------------------------------------------------------------------------------------------


def back_up(settings: Settings, directory: Path, *, clock: Clock) -> FinishedBackup:
    """Make a backup of a running or stopped server."""
    if not (settings.directory / "key").exists():
        raise ServerProblem(f"{settings.home} has no server", hint="set SERVERLESS_GPU_HOME to the home of the server")
    if directory.resolve().is_relative_to(settings.directory.resolve()):
        hint = "use a directory outside of the server's, if possible on another disk"
        raise ServerProblem(f"{directory} is in {settings.directory}, which the backup itself copies", hint=hint)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(directory):
            made = _made(settings, directory, made_ns=clock.wall_ns())
        write_private(settings.directory / LAST_BACKUP, msgspec.json.encode(_record_of(made)))
        return made
    except (OSError, sqlite3.Error) as error:
        raise StorageError(
            f"the backup in {directory} failed: {error}", hint="check the free space of the disk"
        ) from error


def _record_of(made: FinishedBackup) -> BackupRecord:
    manifest = made.manifest
    return BackupRecord(
        path=str(made.path),
        made_ns=manifest.made_ns,
        files=len(manifest.files),
        bytes=sum(entry.size for entry in manifest.files.values()),
        has_database=manifest.database == "sqlite",
    )


def last_backup(settings: Settings) -> tuple[BackupRecord, VerificationRecord | None] | None:
    """Return the last backup with its last verification, or None if this server has made no backup.

    The verification is None if the backup has no record of one, or if this machine cannot read the backup.
    """
    try:
        record = from_json((settings.directory / LAST_BACKUP).read_bytes(), BackupRecord)
    except (OSError, msgspec.MsgspecError):
        return None
    try:
        return record, from_json((Path(record.path) / VERIFIED).read_bytes(), VerificationRecord)
    except (OSError, msgspec.MsgspecError):
        return record, None


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with (directory / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerProblem(f"another backup is already running in {directory}") from None
        except OSError as error:
            raise lock_error(directory, error.strerror or str(error), is_home=False) from error
        yield


def _made(settings: Settings, directory: Path, *, made_ns: int) -> FinishedBackup:
    for left in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left)
    path = directory / _backup_name(made_ns)
    if path.exists():
        raise ServerProblem(f"{path} already exists", hint="start the next backup at least one second later")
    before = _latest(directory)
    partial = directory / f"{_PARTIAL}{path.name}"
    partial.mkdir(mode=0o700)
    try:
        files: dict[str, BackupFile] = {}
        database = _database_file(settings)
        if database is not None:
            files[DATABASE] = _copied_database(database, partial / DATABASE)
        linked = 0
        for name, source in _sources(settings, database):
            # The server deleted the files of an old run during the copy.
            with contextlib.suppress(FileNotFoundError):
                found = _link(source, partial / name, name, before)
                linked += found is not None
                files[name] = found or _copy_file(source, partial / name)
        manifest = Manifest(
            version=_VERSION,
            made_ns=made_ns,
            program=__version__,
            database="postgresql" if database is None else "sqlite",
            files=files,
        )
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        os.sync()
        faults.reach("before_backup_is_named")
        partial.rename(path)
        os.sync()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return FinishedBackup(path=path, manifest=manifest, linked=linked)


def _latest(directory: Path) -> tuple[Path, Manifest] | None:
    """Return the latest readable backup, or None."""
    for path in sorted(directory.glob("*Z"), reverse=True):
        with contextlib.suppress(InvalidValue):
            return path, read_manifest(path)
    return None


def _copied_database(source: Path, target: Path) -> BackupFile:
    """Copy a snapshot of the database, even while the server uses the database."""
    with (
        contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as reading,
        contextlib.closing(sqlite3.connect(target)) as writing,
    ):
        try:
            reading.backup(writing)
            # With `journal_mode=DELETE`, SQLite leaves no log file beside the copy.
            writing.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.DatabaseError as error:
            hint = "keep the earlier backups, which are unchanged"
            raise ServerProblem(f"{source} cannot be backed up: {error}", hint=hint) from error
    target.chmod(0o600)
    _check_database(target)
    copied = target.stat()
    return BackupFile(size=copied.st_size, blake3=_digest(target), mode=0o600, changed_ns=copied.st_mtime_ns)


def _check_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        said = _integrity(connection)
    if said != "ok":
        raise InvalidValue(f"{path} is damaged: {said}")


def _integrity(connection: sqlite3.Connection) -> str:
    """Return "ok", or a description of the first damage in a database."""
    try:
        (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error)
    return str(said)


def _sources(settings: Settings, database: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield the files for the backup, with their names in the backup."""
    configuration = settings.home / "server.toml"
    if configuration.exists():
        yield configuration.name, configuration
    for top, directories, names in os.walk(settings.directory):
        directories[:] = sorted(name for name in directories if name not in _LEFT_OUT)
        for name in sorted(names):
            path = Path(top, name)
            left_out = name in _LEFT_OUT or name.startswith(("server.log", ".")) or name.endswith(_ENDS_LEFT_OUT)
            if not left_out and path != database and path.is_file() and not path.is_symlink():
                yield str(Path("server", path.relative_to(settings.directory))), path


def _link(source: Path, target: Path, name: str, before: tuple[Path, Manifest] | None) -> BackupFile | None:
    """Link an unchanged file to its copy in the previous backup, and return its manifest entry or None."""
    entry = before[1].files.get(name) if before is not None else None
    if before is None or entry is None:
        return None
    status = source.stat()
    if (status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode)) != (entry.size, entry.changed_ns, entry.mode):
        return None
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.link(before[0] / name, target)
    except OSError:  # The file system supports no hard links, or the file has too many links.
        return None
    return entry


def _copy_file(source: Path, target: Path) -> BackupFile:
    """Copy a file with its mode and modification time, and return its manifest entry."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest, size = blake3(), 0
    with source.open("rb") as reading, target.open("xb") as writing:
        status = os.fstat(reading.fileno())
        left = status.st_size  # Output appended during the copy belongs to the next backup.
        while left and (piece := reading.read(min(_PIECE, left))):
            digest.update(piece)
            writing.write(piece)
            size += len(piece)
            left -= len(piece)
    mode = stat.S_IMODE(status.st_mode)
    target.chmod(mode)
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))
    return BackupFile(size=size, blake3=digest.hexdigest(), mode=mode, changed_ns=status.st_mtime_ns)


def verify(backup: Path) -> Manifest:
    """Verify every file of a backup, and return its manifest."""
    manifest = read_manifest(backup)
    for name, entry in manifest.files.items():
        _check_file(backup / name, entry)
    if manifest.database == "sqlite":
        _check_database(backup / DATABASE)
    return manifest


def verify_and_record(backup: Path, *, clock: Clock) -> Manifest:
    """Verify a backup, and record the result in the backup if its directory is writable."""
    try:
        manifest = verify(backup)
    except InvalidValue as error:
        _record_verification(backup, VerificationRecord(at_ns=clock.wall_ns(), problem=error.message))
        raise
    _record_verification(backup, VerificationRecord(at_ns=clock.wall_ns()))
    return manifest


def _record_verification(backup: Path, record: VerificationRecord) -> None:
    if (backup / MANIFEST).exists():
        with contextlib.suppress(OSError):  # Backups may be on a read-only disk.
            write_private(backup / VERIFIED, msgspec.json.encode(record))


def read_manifest(backup: Path) -> Manifest:
    """Read the manifest of a backup."""
    try:
        manifest = from_json((backup / MANIFEST).read_bytes(), Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(
            f"{backup} is not a valid backup: {error}", hint="name a directory with a manifest.json"
        ) from error
    if manifest.version != _VERSION:
        raise InvalidValue(f"{backup} was made by serverless-gpu {manifest.program}, which this version cannot read")
    for name in manifest.files:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise InvalidValue(f"{backup} names a file outside of the backup: {name!r}")
    return manifest


def _check_file(path: Path, entry: BackupFile) -> None:
    """Refuse a file that differs from its manifest entry."""
    try:
        digest = _digest(path)
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror}") from error
    if digest != entry.blake3:
        raise InvalidValue(f"{path} does not match the manifest of the backup", hint="use another backup")


def _digest(path: Path) -> str:
    digest = blake3()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _backup_name(wall_ns: int) -> str:
    """Return the name of a backup made at this time."""
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def _database_file(settings: Settings) -> Path | None:
    """Return the path of the SQLite database file, or None for PostgreSQL."""
    url = sa.make_url(settings.database)
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


# --- restore --------------------------------------------------------------------------------------------------------


def restore(home: Home, backup: Path, *, nothing_ran_since: bool) -> Manifest:
    """Restore a backup into a home without a server."""
    manifest = read_manifest(backup)
    directory = home.root / "server"
    with lock_home(directory, hint="stop the server first: press Ctrl-C where `sgpu up` runs, or stop its service"):
        if directory.exists() and any(directory.iterdir()):
            hint = (
                "use another SERVERLESS_GPU_HOME; or, if you do not need that server any more: "
                f"stop the server first, then mv {directory} {directory}.old"
            )
            raise ServerProblem(f"{home.root} already has a server", hint=hint)
        _bring(home, backup, manifest, nothing_ran_since=nothing_ran_since)
    return manifest


def _bring(home: Home, backup: Path, manifest: Manifest, *, nothing_ran_since: bool) -> None:
    """Copy the backup to a partial directory, check the copy, and rename the directory."""
    partial = home.root / ".server-restoring"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "server").mkdir(mode=0o700, parents=True)
    partial.chmod(0o700)
    try:
        for name, entry in manifest.files.items():
            target = partial / name
            _copy_file(backup / name, target)
            _check_file(target, entry)
        _place(home, partial, manifest, nothing_ran_since=nothing_ran_since)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _place(home: Home, partial: Path, manifest: Manifest, *, nothing_ran_since: bool) -> None:
    """Move the restored files to their final paths, the server's directory last."""
    configuration = home.root / "server.toml"
    if (partial / "server.toml").exists() and not configuration.exists():
        (partial / "server.toml").rename(configuration)
    made = partial / "server"
    made.chmod(0o700)
    if manifest.database == "sqlite":
        place = _database_file(read_settings(home.root, environ=os.environ))
        if place is None:
            hint = f"the backup contains {DATABASE}; remove `database` from {configuration}"
            raise ServerProblem("the backup has an SQLite database, but the settings name PostgreSQL", hint=hint)
        inside = place.parent == home.root / "server"
        target = made / place.name if inside else place
        # SQLite would apply remaining log files to the restored database.
        there = [path for end in ("", *_BESIDE) if (path := target.with_name(f"{target.name}{end}")).exists()]
        if there:
            hint = "; ".join(f"mv {path} {target}.old{path.name.removeprefix(target.name)}" for path in there)
            raise ServerProblem(f"{there[0]} already exists", hint=hint)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.move(partial / DATABASE, target)
    mark = RestoreMark(made_ns=manifest.made_ns, nothing_ran_since=nothing_ran_since)
    (made / RESTORED).write_bytes(msgspec.json.encode(mark))
    os.sync()
    faults.reach("before_restored_is_named")
    made.rename(home.root / "server")
    os.sync()


def settle(database: Transactions, directory: Path, *, measures: ServerMetrics, now_ns: int) -> None:
    """After a restore, settle the runs that were unended in the backup."""
    path = directory / RESTORED
    try:
        mark = from_json(path.read_bytes(), RestoreMark)
    except FileNotFoundError:
        return
    except msgspec.MsgspecError as error:
        raise ServerProblem(f"{path} is not valid: {error}", hint="restore the backup again") from error
    moment = _backup_name(mark.made_ns)
    detail = (
        f"the operator accepted a rolled-back database at {moment}"
        if mark.rolled_back
        else f"the server was restored from a backup of {moment}"
    )
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


# --- rollback -------------------------------------------------------------------------------------------------------


def refuse_rollback(settings: Settings, read: Read, *, now_ns: int, other: str = "") -> str:
    """Refuse to start on a rolled-back database, unless the operator accepts the data loss.

    Return a message about the rollback, or "" without a rollback. `other` names a process that shares the server's
    directory.
    """
    if other and not _is_same_database(settings, read):
        hint = "use another SERVERLESS_GPU_HOME for this server, because servers of one home must use the same database"
        raise ServerProblem(f"{other}, with another database", hint=hint)
    why = rollback_sentence(settings, read)
    if not why:
        return ""
    if not settings.accept_rollback:
        directory = settings.directory
        hint = (
            f"restore a backup: mv {directory} {directory}.old && sgpu server restore BACKUP. Or continue without "
            "the lost data: "
            "sgpu up --accept-rollback; waiting runs then become LOST, because they may have run"
        )
        raise ServerProblem(f"the database was rolled back: {why}", hint=hint)
    file = _database_file(settings)
    if file is not None:  # Lost disk writes may have left a WAL checkpoint of SQLite incomplete.
        with contextlib.closing(sqlite3.connect(file)) as connection:
            said = _integrity(connection)
        if said != "ok":
            raise ServerProblem(
                f"the database was rolled back, and {file} is damaged: {said}",
                hint="restore a backup, because the server cannot use the damaged file",
            )
    restored = RestoreMark(made_ns=now_ns, nothing_ran_since=False, rolled_back=True)
    write_private(settings.directory / RESTORED, msgspec.json.encode(restored))
    return why


def rollback_evidence(settings: Settings, read: Read) -> tuple[str, ...]:
    """Return messages about evidence of lost database writes."""
    why = rollback_sentence(settings, read)
    unknown = server_stores.orphan_runs(settings.directory, read)
    return (
        *([f"the database was rolled back: {why}"] if why else []),
        *([server_stores.orphan_sentence(unknown, settings.directory)] if unknown else []),
    )


def rollback_sentence(settings: Settings, read: Read) -> str:
    """Return a message about a rollback of the database, or "" without evidence of a rollback."""
    path = mark_path(settings)
    # A restore intentionally replaces the database with an older state.
    if path is None or (settings.directory / RESTORED).exists():
        return ""
    mark: HighWaterMark | None
    try:
        # Read the high-water mark before the database, so that commits between the two reads cause no false rollback.
        mark = high_water_mark_file.read_mark(path)
    except high_water_mark_file.UnreadableMark:
        return f"its high-water mark {path} is damaged ({path.stat().st_size} bytes), so the disk lost writes"
    return rollback(mark, read(leader_lock.position), place=place_of(settings))


def mark_path(settings: Settings) -> Path | None:
    """Return the path of the high-water mark, or None for a database in memory."""
    url = sa.make_url(settings.database)
    if url.get_backend_name() != "sqlite":
        return settings.directory / "database.mark"
    file = _database_file(settings)
    return None if file is None else file.with_name(f"{file.name}.mark")


def place_of(settings: Settings) -> str:
    """Return an identifier of the database's location, to find its high-water mark."""
    url = sa.make_url(settings.database)
    if url.get_backend_name() == "sqlite":
        return ""
    bare = url.set(username=None, password=None).difference_update_query(["password", "user"])
    return sha256(bare.render_as_string())[:16]


def _is_same_database(settings: Settings, read: Read) -> bool:
    path = mark_path(settings)
    try:
        mark = None if path is None else high_water_mark_file.read_mark(path)
    except high_water_mark_file.UnreadableMark:
        return True  # `rollback_sentence` reports an unreadable high-water mark.
    found = read(leader_lock.position)
    return mark is None or (found is not None and found.database_id == mark.position.database_id)
