"""The cache's directory `<home>/environments`: its paths, documents, locks and disk.

    units/<aa>/<address>/   site/ prefix/: the unit, read-only · unit, outline: its documents · note: its fetch time and
                            its seal · bytecode: identities of compiled files
    units/<aa>/.new-*       a unit that the holder of its lock is unpacking
    trees/<address>/        members: its units · used, looked: times of the last use and check · snapshot · overlay/ or
                            tree/: the result of the restore
    */.old-*                a replaced or evicted directory that a reader may still use
    locks/<address>         shared by all users of the environment · <address>.making · units/<address> · evicting
    interpreters            descriptions of this machine's interpreters
    layers/                 short names of unit directories, for mounts (`unit_metadata.py`)
    linked                  exists if trees may have links to files of units (`unit_integrity.py`)
    view                    mount point of overlays, in the namespaces of their users

An entry whose name has no leading dot is complete, because a rename creates the entry. The cache does not sync files to
the disk before their first use, because syncing 30,000 files takes seconds. After a reboot, the cache therefore
verifies all files that were not synced.

Locks are files with a flock. The kernel releases a lock when the holding process exits. The exclusive holder of a lock
may remove the lock file. A process that acquires a lock therefore checks that the path still names the locked file, and
otherwise tries again. Executed programs inherit no lock descriptor unless the caller passes one on.

Failure cases: The cache raises `StorageError` if another process holds a lock for too long, or if a directory is not
writable. The cache raises `DiskFull`, a subclass of `StorageError`, if the disk is full.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from serverless_gpu.errors import StorageError
from serverless_gpu.json_codec import from_msgpack
from serverless_gpu.units import format_bytes

LINKED = "linked"
"""Name of a marker file in the cache. The file exists if trees link to files of units. The cache then checks linked
files before each use.
"""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_Value = TypeVar("_Value")
_PAUSE_S = 0.002
_PAUSE_S_MAX = 0.05
_TRIES = 100
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BLOCK_BYTES = 4096
_FILES_MIN = 1000


class UnitNote(msgspec.Struct, frozen=True, kw_only=True):
    """The fetch and the last check of a unit in the cache."""

    size: int  # disk space of the unit, in bytes
    boot: str
    settled: bool = False
    looked_ns: int = 0  # Time of the last check, on the boot-time clock of `boot`.
    # Seal (`unit_integrity.py`) from the last verification of the unit's bytes, or b"" before the first seal.
    files: bytes = b""
    documents: bytes = b""


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """The last check of all units of an environment: the boot, and the time on that boot's clock."""

    boot: str
    at_ns: int


class CachePaths:
    """The paths of files, directories and locks in a cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.units = root / "units"
        self.trees = root / "trees"
        self.locks = root / "locks"
        self.view = root / "view"
        self.linked = root / LINKED
        self.layers = root / "layers"
        # Looking up a path in a dictionary is faster than constructing the path, and an environment has hundreds of
        # units.
        self._known: dict[str, Path] = {}

    def unit(self, address: str) -> Path:
        """Return the directory of a unit, which need not exist."""
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = self.units / address[:2] / address
        return known

    def unit_lock(self, address: str) -> Path:
        """Return the lock that a process holds to fetch, replace or remove a unit."""
        return self.locks / "units" / address

    def environment(self, address: str) -> Path:
        """Return the directory with everything that restore made from a snapshot."""
        return self.trees / address

    def use_lock(self, address: str) -> Path:
        """Return the lock that all users of an environment share."""
        return self.locks / address

    def making_lock(self, address: str) -> Path:
        """Return the lock of the process that assembles an environment."""
        return self.locks / f"{address}.making"

    def note(self, address: str) -> UnitNote | None:
        """Return the record of a unit, or None if the cache lacks the unit."""
        return read_document(self.unit(address) / "note", UnitNote)

    def looked(self, address: str) -> Path:
        """Return the file with the time of the last check of an environment's units."""
        return self.environment(address) / "looked"

    def compiling_lock(self) -> Path:
        """Return the lock that compiling processes share, so that a check does not remove their new files."""
        return self.locks / "compiling"

    def write_note(self, address: str, note: UnitNote) -> None:
        """Write the record of a unit, and preserve the file's modification time, which is the fetch time."""
        path = self.unit(address) / "note"
        before = path.stat().st_mtime_ns
        write_document(path, note)
        os.utime(path, ns=(before, before))


def read_document(path: Path, kind: type[_Value]) -> _Value | None:
    """Return a document of the cache, or None if the document is missing or not valid."""
    try:
        return from_msgpack(path.read_bytes(), kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def write_document(path: Path, value: object) -> None:
    """Write a document of the cache atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.msgpack.encode(value))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_public(directory: Path) -> None:
    """Make a directory that other users can read, with any umask."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o555 != 0o555:
        directory.chmod(0o755)


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories atomically where the kernel supports this, else by three renames."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    aside = put_aside(other)
    one.rename(other)
    aside.rename(one)


def put_aside(directory: Path) -> Path:
    """Rename a directory so that a sweep deletes it, and return the new path."""
    aside = directory.with_name(f".old-{directory.name.removeprefix('.new-')}-{os.urandom(4).hex()}")
    directory.rename(aside)
    return aside


def delete(directory: Path) -> None:
    """Delete a directory tree, and ignore entries that another process deletes at the same time."""
    with contextlib.suppress(FileNotFoundError):
        try:
            shutil.rmtree(directory)
        except PermissionError:  # Directories of link trees are read-only, even for their owner.
            for here, _, _ in os.walk(directory):
                os.chmod(here, 0o700)
            shutil.rmtree(directory)


def write_to_disk(directory: Path) -> None:
    """Sync the file system of a directory to its disk, and wait until all data is written."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not hasattr(libc, "syncfs") or libc.syncfs(fd) != 0:
            os.sync()
    finally:
        os.close(fd)


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """Return a descriptor that holds the lock, or None while another process holds the lock."""
    for _ in range(_TRIES):
        fd = _open(path)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError as error:
            os.close(fd)
            raise StorageError(f"The file {path} cannot be locked: {error.strerror}.") from error
        with contextlib.suppress(FileNotFoundError):  # The previous holder may have removed the lock file.
            if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
                return fd
        os.close(fd)
    raise StorageError(f"Cannot acquire the lock {path}: other processes removed the lock file {_TRIES} times.")


def lock(path: Path, *, shared: bool = False, wait_s: float) -> int:
    """Wait for the lock, and return a descriptor that holds the lock."""
    deadline = time.monotonic() + wait_s
    pause = _PAUSE_S
    while (fd := try_lock(path, shared=shared)) is None:
        if time.monotonic() > deadline:
            raise StorageError(
                f"Another process has held the lock {path} for more than {wait_s:.0f} s.",
                hint=f"find the process that holds the lock: fuser {path}",
            )
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_S_MAX)
    return fd


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait_s: float) -> Iterator[None]:
    """Acquire a lock as `lock` does, and hold the lock while the block runs."""
    fd = lock(path, shared=shared, wait_s=wait_s)
    try:
        yield
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)
    except OSError as error:
        raise StorageError(f"The lock file {path} cannot be opened: {error.strerror}.") from error


class DiskFull(StorageError):
    """The disk has no space for an environment."""


def free_bytes(directory: Path) -> int:
    """Return the number of bytes that an ordinary user can still write to the disk of a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def total_bytes(directory: Path) -> int:
    """Return the size of the disk of a directory, in bytes."""
    status = os.statvfs(directory)
    return status.f_blocks * status.f_frsize


def disk_of(directory: Path) -> Path:
    """Return the mount point of the disk that holds a directory."""
    place = Path(os.path.realpath(directory))
    device = os.stat(place).st_dev
    while place != place.parent and os.stat(place.parent).st_dev == device:
        place = place.parent
    return place


def occupied_bytes(size: int, files: int) -> int:
    """Estimate the disk space of files: content, half a block for each file, and directory entries."""
    return size + files * (_BLOCK_BYTES // 2 + 256)


def is_full(error: OSError) -> bool:
    """Return True if an error means that the disk, or the user's quota, is full."""
    return error.errno in _FULL


def full(directory: Path, needed: int, floor: int) -> DiskFull:
    """Return the error for a full disk.

    `needed` is the number of bytes to write. `floor` is the number of bytes that must stay free.
    """
    status = os.statvfs(directory)
    if status.f_files and status.f_favail < _FILES_MIN:
        return DiskFull(
            f"The disk at {disk_of(directory)} is full: it has no free inodes for files in {directory}, "
            f"though {format_bytes(free_bytes(directory))} are free.",
            hint="delete files on this disk, or set SERVERLESS_GPU_HOME to a directory on a disk with more inodes",
        )
    kept = f", and {format_bytes(floor)} of it must stay free" if floor else ""
    return DiskFull(
        f"The disk at {disk_of(directory)} is full: {format_bytes(free_bytes(directory))} are free{kept}; "
        f"the environment needs {format_bytes(needed)} more in {directory}.",
        hint="free space on this disk, or set SERVERLESS_GPU_HOME to a directory on a larger disk",
    )
