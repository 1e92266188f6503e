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

The cache creates complete entries by renaming temporary entries, whose names start with a dot. To start runs quickly,
the cache does not sync new files to the disk. After a reboot, the cache therefore verifies all files that were not
synced.

Each lock is a flock on a file, which the kernel releases when the lock holder exits. The exclusive holder of a lock may
remove the lock file. A process that has acquired a lock therefore checks that the path still refers to the locked file.
If the lock file was replaced, the process acquires the lock again. Child processes inherit a lock descriptor only if
the caller passes the descriptor explicitly.

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
"""Name of a marker file in the cache. The marker file exists if trees may link to files of units.
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
    """Record of the fetch and the last check of a cached unit."""

    size: int  # Disk space of the unit in bytes.
    boot: str
    settled: bool = False
    looked_ns: int = 0  # Time of the unit's last check, on the boot-time clock of `boot`.
    # Seal of the unit's files (`unit_integrity.py`) at their last verification, or b"" for an unsealed unit.
    files: bytes = b""
    documents: bytes = b""


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the last check of an environment's units: a boot, and a time on that boot's clock."""

    boot: str
    at_ns: int


class CachePaths:
    """Paths of files, directories and locks in a cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.units = root / "units"
        self.trees = root / "trees"
        self.locks = root / "locks"
        self.view = root / "view"
        self.linked = root / LINKED
        self.layers = root / "layers"
        # Caches unit paths, because an environment has hundreds of units and path construction is slow.
        self._known: dict[str, Path] = {}

    def unit(self, address: str) -> Path:
        """Return the path of a unit's directory."""
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = self.units / address[:2] / address
        return known

    def unit_lock(self, address: str) -> Path:
        """Return the lock for fetching, replacing or removing a unit."""
        return self.locks / "units" / address

    def environment(self, address: str) -> Path:
        """Return the directory of the files that a restore creates for a snapshot."""
        return self.trees / address

    def use_lock(self, address: str) -> Path:
        """Return the lock that all users of an environment share."""
        return self.locks / address

    def making_lock(self, address: str) -> Path:
        """Return the lock for assembling an environment."""
        return self.locks / f"{address}.making"

    def note(self, address: str) -> UnitNote | None:
        """Return the record of a unit, or None for a unit that is not in the cache."""
        return read_document(self.unit(address) / "note", UnitNote)

    def looked(self, address: str) -> Path:
        """Return the file that records the last check of an environment's units."""
        return self.environment(address) / "looked"

    def compiling_lock(self) -> Path:
        """Return the lock that protects new bytecode from a concurrent check.

        Compiling processes share the lock.
        """
        return self.locks / "compiling"

    def write_note(self, address: str, note: UnitNote) -> None:
        """Write the record of a unit.

        The method preserves the record's modification time, which stores the fetch time.
        """
        path = self.unit(address) / "note"
        before = path.stat().st_mtime_ns
        write_document(path, note)
        os.utime(path, ns=(before, before))


def read_document(path: Path, kind: type[_Value]) -> _Value | None:
    """Return a document of the cache, or None for a missing or invalid document."""
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
    """Create a directory that other users can read, independent of the umask."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o555 != 0o555:
        directory.chmod(0o755)


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories atomically, or by three renames on kernels without atomic exchange."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    aside = put_aside(other)
    one.rename(other)
    aside.rename(one)


def put_aside(directory: Path) -> Path:
    """Rename a directory for deletion by a later sweep, and return the new path."""
    aside = directory.with_name(f".old-{directory.name.removeprefix('.new-')}-{os.urandom(4).hex()}")
    directory.rename(aside)
    return aside


def delete(directory: Path) -> None:
    """Delete a directory tree, and ignore entries that another process deletes concurrently."""
    with contextlib.suppress(FileNotFoundError):
        try:
            shutil.rmtree(directory)
        except PermissionError:  # Directories of link trees are read-only, even for their owner.
            for here, _, _ in os.walk(directory):
                os.chmod(here, 0o700)
            shutil.rmtree(directory)


def write_to_disk(directory: Path) -> None:
    """Sync the file system of a directory to the disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not hasattr(libc, "syncfs") or libc.syncfs(fd) != 0:
            os.sync()
    finally:
        os.close(fd)


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """Return a file descriptor that holds the lock, or None if another process holds the lock."""
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
        with contextlib.suppress(FileNotFoundError):  # The previous lock holder may have removed the file.
            if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
                return fd
        os.close(fd)
    raise StorageError(f"The lock {path} is not available: other processes removed the lock file {_TRIES} times.")


def lock(path: Path, *, shared: bool = False, wait_s: float) -> int:
    """Wait for a lock, and return a file descriptor that holds the lock."""
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
    """Hold a lock while the `with` block runs."""
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
    """Raised if the disk has too little space for an environment."""


def free_bytes(directory: Path) -> int:
    """Return the free bytes, for ordinary users, on the disk that contains a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def total_bytes(directory: Path) -> int:
    """Return the size of the disk that contains a directory in bytes."""
    status = os.statvfs(directory)
    return status.f_blocks * status.f_frsize


def disk_of(directory: Path) -> Path:
    """Return the mount point of the disk that contains a directory."""
    place = Path(os.path.realpath(directory))
    device = os.stat(place).st_dev
    while place != place.parent and os.stat(place.parent).st_dev == device:
        place = place.parent
    return place


def occupied_bytes(size: int, files: int) -> int:
    """Estimate the disk space for files: content, half a block per file, and directory entries."""
    return size + files * (_BLOCK_BYTES // 2 + 256)


def is_full(error: OSError) -> bool:
    """Return True if an error reports a full disk or an exhausted quota."""
    return error.errno in _FULL


def full(directory: Path, needed: int, floor: int) -> DiskFull:
    """Return the error for a full disk.

    `needed` is the number of bytes to write. `floor` is the number of bytes that must stay free.
    """
    status = os.statvfs(directory)
    if status.f_files and status.f_favail < _FILES_MIN:
        return DiskFull(
            f"The disk at {disk_of(directory)} has no free inodes for files in {directory}, although "
            f"{format_bytes(free_bytes(directory))} are free.",
            hint="delete files on this disk, or set SERVERLESS_GPU_HOME to a directory on a disk with more inodes",
        )
    kept = f", but {format_bytes(floor)} must stay free" if floor else ""
    return DiskFull(
        f"The disk at {disk_of(directory)} is full: {format_bytes(free_bytes(directory))} are free{kept}. The "
        f"environment needs {format_bytes(needed)} more in {directory}.",
        hint="delete files on this disk, or set SERVERLESS_GPU_HOME to a directory on a larger disk",
    )
