"""The cache's directory `<home>/environments`: paths, documents, locks, and the disk that it is on.

    units/<aa>/<address>/   site/ prefix/  the unit, read-only · unit, outline: its documents · note: how it came, and
                            its seal · bytecode: identities of what was compiled
    units/<aa>/.new-*       being unpacked, by the holder of the unit's lock
    trees/<address>/        members: its units · used, looked: when last · snapshot · overlay/ or tree/: what restore
                            made
    */.old-*                replaced or evicted, not deleted yet because a reader may use it
    locks/<address>         shared by all who use the environment · <address>.making · units/<address> · evicting
    interpreters            what those of this machine have said they are
    layers/                 short names of units' directories, for mounts (`unit_metadata.py`)
    linked                  there if trees may have links to files of units (`unit_integrity.py`)
    view                    where overlays are mounted, in the namespaces of those who use them

What has no dot at its front is whole: it came there by a rename. Nothing in a cache is written to the disk before it is
used (30,000 files would take seconds), so what an earlier boot of this machine left is read again before it is
believed.

Locks are files with a flock, which the kernel releases when their holder dies. A lock file may be removed by the
process that holds it exclusively, so a process that gets a lock looks whether the file is still the one that has the
name, and tries again if not. Programs that are executed inherit no descriptor, unless it is handed on.

Failure cases, all `StorageError`: a holder that keeps a lock for longer than the bound, a directory that cannot be
written, a full disk (`DiskFull`).
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
"""Below the root: links lead to files of units, so these are looked at before each use."""
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
    """How a unit came into the cache."""

    size: int  # bytes it takes
    boot: str
    settled: bool = False
    looked_ns: int = 0  # when it was last looked at, since that boot
    # its seal (`unit_integrity.py`), when its bytes were last known to be right; b"" before it had one
    files: bytes = b""
    documents: bytes = b""


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """When all units of an environment were last looked at: in which boot, and when since then."""

    boot: str
    at_ns: int


class CachePaths:
    """The paths of a cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.units = root / "units"
        self.trees = root / "trees"
        self.locks = root / "locks"
        self.view = root / "view"
        self.linked = root / LINKED
        self.layers = root / "layers"
        self._known: dict[str, Path] = {}  # a path costs more to make than to look up, and an environment has hundreds

    def unit(self, address: str) -> Path:
        """Return where a unit is, or would be."""
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = self.units / address[:2] / address
        return known

    def unit_lock(self, address: str) -> Path:
        """Return the lock that a process holds to fetch, replace or remove a unit."""
        return self.locks / "units" / address

    def environment(self, address: str) -> Path:
        """Return where what was made of a snapshot is."""
        return self.trees / address

    def use_lock(self, address: str) -> Path:
        """Return the lock that all who use an environment share."""
        return self.locks / address

    def making_lock(self, address: str) -> Path:
        """Return the lock of the process that assembles an environment."""
        return self.locks / f"{address}.making"

    def note(self, address: str) -> UnitNote | None:
        """Return how a unit came here; None when it is not here."""
        return read_document(self.unit(address) / "note", UnitNote)

    def looked(self, address: str) -> Path:
        """Return the file that says when the units of an environment were last looked at."""
        return self.environment(address) / "looked"

    def compiling_lock(self) -> Path:
        """Return the lock that all who compile share, so that a look does not take their files for altered ones."""
        return self.locks / "compiling"

    def write_note(self, address: str, note: UnitNote) -> None:
        """Write how a unit came here, and keep when that was."""
        path = self.unit(address) / "note"
        before = path.stat().st_mtime_ns
        write_document(path, note)
        os.utime(path, ns=(before, before))


def read_document(path: Path, kind: type[_Value]) -> _Value | None:
    """Return a document of ours; None when it is not there or cannot be read."""
    try:
        return from_msgpack(path.read_bytes(), kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def write_document(path: Path, value: object) -> None:
    """Write a document of ours, at once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.msgpack.encode(value))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_public(directory: Path) -> None:
    """Make a directory others may look into, whatever the umask is."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o555 != 0o555:
        directory.chmod(0o755)


def exchange(one: Path, other: Path) -> None:
    """Let two directories trade places, so that there is always one of them; where that is not possible, nearly."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    aside = put_aside(other)
    one.rename(other)
    aside.rename(one)


def put_aside(directory: Path) -> Path:
    """Give a directory a name that says it is to be deleted, and return that."""
    aside = directory.with_name(f".old-{directory.name.removeprefix('.new-')}-{os.urandom(4).hex()}")
    directory.rename(aside)
    return aside


def delete(directory: Path) -> None:
    """Delete a directory with everything in it; what another process deletes at the same time is no error."""
    with contextlib.suppress(FileNotFoundError):
        try:
            shutil.rmtree(directory)
        except PermissionError:  # trees of links cannot be written, also not by their owner
            for here, _, _ in os.walk(directory):
                os.chmod(here, 0o700)
            shutil.rmtree(directory)


def write_to_disk(directory: Path) -> None:
    """Wait until everything on the file system of a directory is on its disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not hasattr(libc, "syncfs") or libc.syncfs(fd) != 0:
            os.sync()
    finally:
        os.close(fd)


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """Return a descriptor that holds the lock, or None when another process has it."""
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
        with contextlib.suppress(FileNotFoundError):  # its last holder may have removed the file
            if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
                return fd
        os.close(fd)
    raise StorageError(f"The lock file {path} is removed again and again.")


def lock(path: Path, *, shared: bool = False, wait_s: float) -> int:
    """Return a descriptor that holds the lock, once it is free."""
    deadline = time.monotonic() + wait_s
    pause = _PAUSE_S
    while (fd := try_lock(path, shared=shared)) is None:
        if time.monotonic() > deadline:
            raise StorageError(
                f"The lock {path} has been held for more than {wait_s:.0f} s.",
                hint=f"find out who holds it: fuser {path}",
            )
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_S_MAX)
    return fd


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait_s: float) -> Iterator[None]:
    """Hold a lock for as long as the block runs; see `lock`."""
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
    """A disk has no room for an environment."""


def free_bytes(directory: Path) -> int:
    """Return how much an ordinary user can still write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def total_bytes(directory: Path) -> int:
    """Return how large the disk is."""
    status = os.statvfs(directory)
    return status.f_blocks * status.f_frsize


def disk_of(directory: Path) -> Path:
    """Return where the disk of a directory is mounted."""
    place = Path(os.path.realpath(directory))
    device = os.stat(place).st_dev
    while place != place.parent and os.stat(place.parent).st_dev == device:
        place = place.parent
    return place


def occupied_bytes(size: int, files: int) -> int:
    """Return about how much files take on a disk: half a block more each than they hold, and their entries."""
    return size + files * (_BLOCK_BYTES // 2 + 256)


def is_full(error: OSError) -> bool:
    """Return whether this error means that the disk, or the user's share of it, is full."""
    return error.errno in _FULL


def full(directory: Path, needed: int, floor: int) -> DiskFull:
    """Return the error that says a disk is full.

    `needed` bytes were to be written, and `floor` bytes have to stay free.
    """
    status = os.statvfs(directory)
    if status.f_files and status.f_favail < _FILES_MIN:
        return DiskFull(
            f"The disk at {disk_of(directory)} is full: no more files can be made in {directory}, "
            f"though {format_bytes(free_bytes(directory))} are free.",
            hint="delete files there, or let SERVERLESS_GPU_HOME name a directory on a disk with more inodes",
        )
    kept = f", and {format_bytes(floor)} of it stay free" if floor else ""
    return DiskFull(
        f"The disk at {disk_of(directory)} is full: {format_bytes(free_bytes(directory))} are free{kept}; "
        f"the environment needs {format_bytes(needed)} more in {directory}.",
        hint="make space there, or let SERVERLESS_GPU_HOME name a directory on a larger disk",
    )
