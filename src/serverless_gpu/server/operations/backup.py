"""A backup of a server: a directory that has everything a server on SQLite needs to go on, and proof that it is whole.

    DIRECTORY/2026-11-22T10-20-31Z/
        manifest.json          what is in it, with sizes and digests
        server.toml            of the home, when it is there
        database.db            a moment of the database; of PostgreSQL nothing: pg_dump comes before this
        server/…               key, tokens, output of ranks, parts, environments

The server goes on meanwhile. The database is copied first, in one reading transaction, and the files afterwards: bytes
are there before the row that names them, so the files have everything that the copy names. What was copied before and
is as it was, by size and time, is a hard link to the backup before: a day costs what a day brought.

A directory gets its name when everything in it is on disk. What a backup that was ended left is removed by the next.

Failure cases: no room (said, nothing is left but the parts of before), a file that goes while files are copied (of runs
that ended long ago: left out), a backup that was altered (`verify` names the first file).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import sqlalchemy as sa
from blake3 import blake3

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, ServerProblem, StorageError
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.requirements import lock_error
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.version import __version__

MANIFEST = "manifest.json"
DATABASE = "database.db"
_VERSION = 1
_PIECE = 1 << 20
_PARTIAL = ".partial-"
# Of this process and this machine, or on their way: nothing that is missed.
_LEFT_OUT = frozenset({"lock", "certificate.json", "node.json", "restored.json", "incoming", "nearby"})
_ENDS_LEFT_OUT = (".lock", ".tmp", ".log", ".reserve", ".mark", "-wal", "-shm", "-journal")


class BackupFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a backup, as it is and as it was: mode and time of its last change, nanoseconds since 1970."""

    size: int
    blake3: str
    mode: int
    changed_ns: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a backup."""

    version: int  # of this description
    made_ns: int  # nanoseconds since 1970, before the database was copied
    program: str  # version of serverless-gpu
    database: str  # sqlite or postgresql
    files: Mapping[str, BackupFile]  # by their path in the backup


class FinishedBackup(msgspec.Struct, frozen=True, kw_only=True):
    """A finished backup."""

    path: Path
    manifest: Manifest
    linked: int  # how many of its files are those of the backup before


def back_up(settings: Settings, directory: Path, *, clock: Clock) -> FinishedBackup:
    """Make a backup, beside a server that runs or without one."""
    if not (settings.directory / "key").exists():
        raise ServerProblem(f"{settings.home} has no server", hint="SERVERLESS_GPU_HOME says which home")
    if directory.resolve().is_relative_to(settings.directory.resolve()):
        hint = "a directory outside of it, on another disk if there is one"
        raise ServerProblem(f"{directory} is in {settings.directory}, which is what is backed up", hint=hint)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(directory):
            return _made(settings, directory, made_ns=clock.wall_ns())
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"the backup in {directory} was not made: {error}", hint="is there room?") from error


def verify(backup: Path) -> Manifest:
    """Verify every file of a backup; return its manifest."""
    manifest = read_manifest(backup)
    for name, entry in manifest.files.items():
        check(backup / name, entry)
    if manifest.database == "sqlite":
        _check_database(backup / DATABASE)
    return manifest


def read_manifest(backup: Path) -> Manifest:
    """Return the manifest of a backup."""
    try:
        manifest = from_json((backup / MANIFEST).read_bytes(), Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"{backup} is no backup: {error}", hint="it is a directory with a manifest.json") from error
    if manifest.version != _VERSION:
        raise InvalidValue(f"{backup} was made by serverless-gpu {manifest.program}, which this version cannot read")
    for name in manifest.files:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise InvalidValue(f"{backup} names a file outside of itself: {name!r}")
    return manifest


def check(path: Path, entry: BackupFile) -> None:
    """Refuse a file that does not match its entry in the manifest."""
    try:
        with path.open("rb") as file:
            digest = blake3()
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror}") from error
    if digest.hexdigest() != entry.blake3:
        raise InvalidValue(f"{path} is not what was backed up", hint="use another backup")


def copy(source: Path, target: Path) -> BackupFile:
    """Copy a file as it is now, with its mode and time; return its entry."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest, size = blake3(), 0
    with source.open("rb") as reading, target.open("xb") as writing:
        status = os.fstat(reading.fileno())
        left = status.st_size  # output that is appended meanwhile is of a later moment
        while left and (piece := reading.read(min(_PIECE, left))):
            digest.update(piece)
            writing.write(piece)
            size += len(piece)
            left -= len(piece)
    mode = stat.S_IMODE(status.st_mode)
    target.chmod(mode)
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))
    return BackupFile(size=size, blake3=digest.hexdigest(), mode=mode, changed_ns=status.st_mtime_ns)


def file_of(settings: Settings) -> Path | None:
    """Return the file of the database, or None when it is PostgreSQL's."""
    url = sa.make_url(settings.database)
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def name_of(wall_ns: int) -> str:
    """Return the name of a backup of this moment."""
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def _made(settings: Settings, directory: Path, *, made_ns: int) -> FinishedBackup:
    for left in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left)
    path = directory / name_of(made_ns)
    if path.exists():
        raise ServerProblem(f"{path} is there already", hint="a backup takes a second at least")
    before = _latest(directory)
    partial = directory / f"{_PARTIAL}{path.name}"
    partial.mkdir(mode=0o700)
    try:
        files: dict[str, BackupFile] = {}
        database = file_of(settings)
        if database is not None:
            files[DATABASE] = _copied_database(database, partial / DATABASE)
        linked = 0
        for name, source in _sources(settings, database):
            with contextlib.suppress(FileNotFoundError):  # of a run that ended long ago, gone meanwhile
                found = _link(source, partial / name, name, before)
                linked += found is not None
                files[name] = found or copy(source, partial / name)
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


def _copied_database(source: Path, target: Path) -> BackupFile:
    """Copy a moment of a database that is in use."""
    with (
        contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as reading,
        contextlib.closing(sqlite3.connect(target)) as writing,
    ):
        try:
            reading.backup(writing)
            writing.execute("PRAGMA journal_mode = DELETE")  # else its log would be a file beside it
        except sqlite3.DatabaseError as error:
            hint = "the backups of before are as they were; keep them"
            raise ServerProblem(f"{source} cannot be backed up: {error}", hint=hint) from error
    target.chmod(0o600)
    _check_database(target)
    copied = target.stat()
    with target.open("rb") as file:
        digest = blake3()
        while piece := file.read(_PIECE):
            digest.update(piece)
    return BackupFile(size=copied.st_size, blake3=digest.hexdigest(), mode=0o600, changed_ns=copied.st_mtime_ns)


def _check_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        try:
            (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            said = str(error)
    if said != "ok":
        raise InvalidValue(f"{path} is not whole: {said}")


def _sources(settings: Settings, database: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield the files to copy, with their names in the backup."""
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


def _latest(directory: Path) -> tuple[Path, Manifest] | None:
    """Return the latest backup that can be read, or None."""
    for path in sorted(directory.glob("*Z"), reverse=True):
        with contextlib.suppress(InvalidValue):
            return path, read_manifest(path)
    return None


def _link(source: Path, target: Path, name: str, before: tuple[Path, Manifest] | None) -> BackupFile | None:
    """Link a file that is unchanged since the backup before; return its entry, or None if it has to be copied."""
    entry = before[1].files.get(name) if before is not None else None
    if before is None or entry is None:
        return None
    status = source.stat()
    if (status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode)) != (entry.size, entry.changed_ns, entry.mode):
        return None
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.link(before[0] / name, target)
    except OSError:  # no links there, or not so many
        return None
    return entry


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with (directory / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerProblem(f"another backup is being made in {directory}") from None
        except OSError as error:
            raise lock_error(directory, error.strerror or str(error), is_home=False) from error
        yield
