"""Stores objects in a directory on a local or mounted file system, or in memory for tests.

    <root>/packs/3f/3f09…      objects, 0400, in directories 0700; the first two digits keep directories small
    <root>/gc/condemned
    <root>/incoming/…          unfinished files, under names that no reader requests

    write all under other names, the disk begins ─▶ wait for each ─▶ rename all ─▶ wait for their directories
                                                 the first wait includes the journal, so later waits
                                                 find their data already written

The store gives an object its final name only after the object's bytes are on the disk. Even after a power cut, an
object therefore exists completely or not at all. If two writers put the same key, the later object replaces the earlier
object. The store syncs all objects of one call together, which is faster than syncing each object. A killed writer
leaves a partial file under `incoming/`. The `delete` method, which only garbage collection calls, removes killed
writers' files after a day.

The store writes large objects without the page cache if the file system allows it (`write_direct`). The page cache
would only keep another copy of large objects, because the store makes large objects durable at once. Writing 390 MB
through the page cache takes 0.9 s of CPU time. Direct writing takes 0.02 s. Writing through the page cache would also
evict cached files of the user's programs. If direct writing is impossible, the store writes through the page cache.
Direct writing requires whole disk blocks and aligned memory. tmpfs and some network and FUSE file systems do not
support direct writing.

Failure cases: The store raises StorageError if the disk is full. If the disk reports too little free space, the store
raises the error before it writes any bytes. If a directory is not accessible, or an object's path is a link, the store
raises StoreUnavailable.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from serverless_gpu import faults
from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.environment.stores.base import (
    Store,
    Stored,
    check_key,
    check_prefix,
    check_range,
    check_size,
)
from serverless_gpu.errors import EnvironmentRejected, ServerlessGpuError, StorageError, StoreUnavailable
from serverless_gpu.operating_system import lacks_inodes
from serverless_gpu.units import format_bytes

SIZE_MIN = 1024 * 1024
"""Minimum size in bytes of an object that the store writes without the page cache.

For smaller objects, writing through the page cache costs almost nothing.
"""
_STEP = 4 * 1024 * 1024
_BLOCK = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has no O_DIRECT.
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
OPEN_MAX = 64
"""Maximum number of files that the store opens at the same time."""
_PRIVATE = 0o700
INCOMING = "incoming"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEFTOVERS_S = 24 * 3600
# Opening an object fails if it is a link or a pipe, instead of following the link or blocking.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class DirectoryStore(Store):
    """Stores objects as files in a directory.

    A file under `incoming/` older than `leftovers_s` seconds is a killed writer's leftover.
    """

    def __init__(self, root: Path, *, clock: Clock | None = None, leftovers_s: int = LEFTOVERS_S) -> None:
        self._root = root.absolute()
        self.url = self._root.as_uri()
        self._clock = clock or SystemClock()
        self._leftovers_ns = leftovers_s * 10**9

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes of an object, or a range of the bytes."""
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(key) from None
        except OSError as error:
            raise self._problem("read", key, error) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise StoreUnavailable(
                    f"{path} is not a regular file", hint="find the program that created this path, and delete the path"
                )
            there = max(0, status.st_size - start)
            wanted = there if length is None else length
            check_range(key, start, wanted)
            return _read(fd, start, min(wanted, there))
        except OSError as error:
            raise self._problem("read", key, error) from error
        finally:
            os.close(fd)

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects durably and atomically, replacing existing objects."""
        contents = {self._path(key): check_size(key, data) for key, data in objects.items()}
        total = sum(map(len, contents.values()))
        try:
            if contents:
                make_directories((self._root / INCOMING, *(self._root / key.partition("/")[0] for key in objects)))
            free = self.free_bytes()
            if free is not None and total > free:
                raise self._full(f"{format_bytes(total)} to write, {format_bytes(free)} free")
            write_together(self._root / INCOMING, contents, now_ns=self._clock.wall_ns())
        except OSError as error:
            what = next(iter(objects)) if len(objects) == 1 else f"{len(objects)} objects"
            raise self._problem("write", what, error) from error

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys of the given objects that exist in the store."""
        try:
            return frozenset(key for key in keys if _is_file(self._path(key)))
        except OSError as error:
            raise self._problem("look at", "an object", error) from error

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return all objects below `prefix/`."""
        top = self._root / check_prefix(prefix)
        try:
            for entry in _files(top):
                key = f"{prefix}/{entry.name}"
                # The store does not list or delete other programs' files.
                if entry.path != str(self._root / _place(key)):
                    continue
                with contextlib.suppress(FileNotFoundError, EnvironmentRejected):
                    status = entry.stat(follow_symlinks=False)
                    yield Stored(check_key(key), status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise self._problem("list", prefix, error) from error

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, ignoring objects that do not exist."""
        parents = set()
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
                parents.add(path.parent)
            except NotADirectoryError:
                continue
            except OSError as error:
                raise self._problem("delete", key, error) from error
        try:
            for parent in parents:
                with contextlib.suppress(FileNotFoundError):
                    sync_directory(parent)
            self._remove_leftovers()
        except OSError as error:
            raise self._problem("clean", INCOMING, error) from error

    def free_bytes(self) -> int | None:
        """Return the number of bytes that the current user can still write to the disk, or None if unknown."""
        for directory in (self._root, *self._root.parents):
            try:
                disk = os.statvfs(directory)
            except FileNotFoundError:
                continue
            except OSError:
                return None
            # Some network and FUSE file systems report a block count of 0.
            return disk.f_bavail * disk.f_frsize if disk.f_blocks else None
        return None

    def _path(self, key: str) -> Path:
        return self._root / _place(check_key(key))

    def _remove_leftovers(self) -> None:
        """Remove old files of killed writers, judging their age by the file system's clock."""
        incoming = self._root / INCOMING
        if not incoming.is_dir():
            return
        fd, probe = tempfile.mkstemp(dir=incoming)
        with closed(fd):
            now = os.fstat(fd).st_ctime_ns
        for entry in (*os.scandir(incoming),):
            with contextlib.suppress(FileNotFoundError):
                if entry.path == probe or now - entry.stat(follow_symlinks=False).st_ctime_ns > self._leftovers_ns:
                    os.unlink(entry.path)

    def _problem(self, verb: str, what: str, error: OSError) -> ServerlessGpuError:
        if error.errno in _FULL:
            return self._full(os.strerror(error.errno or 0))
        return StoreUnavailable(
            f"cannot {verb} {what} in the store {self.url}: {error.strerror or error}",
            hint=f"give this user read and write permission for {self._root}; check it with `ls -la {self._root}`",
        )

    def _full(self, why: str) -> StorageError:
        if lacks_inodes(self._root):
            return StorageError(
                f"no inodes left in the store {self.url}, so its disk cannot store more files",
                hint="delete files on this disk (`sgpu env gc` removes unused objects), or choose a store on "
                "another disk",
            )
        return StorageError(
            f"no space left in the store {self.url}: {why}",
            hint="free some space on its disk (`sgpu env gc` removes unused objects), or choose another store",
        )


def _place(key: str) -> str:
    kind, _, name = key.partition("/")
    return key if kind == "gc" else f"{kind}/{name[:2]}/{name}"


def _read(fd: int, start: int, length: int) -> bytes:
    if length <= 0:
        return b""
    data = os.pread(fd, length, start)
    if len(data) == length:
        return data
    pieces = [data]
    # The kernel returns large reads in parts. An empty part marks the end of the file.
    while data and (missing := length - sum(map(len, pieces))):
        data = os.pread(fd, missing, start + length - missing)
        pieces.append(data)
    return b"".join(pieces)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _files(top: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the files in a directory and in its immediate subdirectories."""
    for entry in _entries(top):
        if entry.is_dir(follow_symlinks=False):
            yield from (below for below in _entries(entry.path) if below.is_file(follow_symlinks=False))
        elif entry.is_file(follow_symlinks=False):
            yield entry


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def write_direct(fd: int, data: memoryview) -> int:
    """Write the start of an empty file without the page cache.

    The file position of `fd` must be 0, and `data` must be the whole content. Return the number of bytes written, which
    may be less than the length of `data`. The caller must write the remaining bytes.
    """
    if not _DIRECT or len(data) < SIZE_MIN:
        return 0
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT)
    except OSError:
        return 0
    try:
        return _write(fd, data, len(data) - len(data) % _BLOCK)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _write(fd: int, data: memoryview, end: int) -> int:
    done = 0
    # Python's `mmap` returns page-aligned memory, which direct writing requires.
    with mmap.mmap(-1, min(_STEP, end)) as aligned:
        while done < end:
            size = min(len(aligned), end - done)
            aligned[:size] = data[done : done + size]
            with memoryview(aligned) as whole, whole[:size] as part:
                try:
                    written = os.write(fd, part)
                except OSError as error:
                    if error.errno in _REFUSED:
                        return done
                    raise
            done += written
            if written % _BLOCK:
                # The kernel wrote only part of the data, for example because the disk is nearly full. Writing the
                # remaining bytes through the page cache then reports the error.
                return done
    return done


def write_together(incoming: Path, contents: Mapping[Path, memoryview], *, now_ns: int) -> None:
    """Write files durably, replacing existing files.

    `incoming` must be a directory on the same disk as the files. The parent directory of each path may be missing. The
    grandparent directory must exist.
    """
    left = iter(contents.items())
    while some := dict(itertools.islice(left, OPEN_MAX)):
        _write_some(incoming, some, now_ns)


def _write_some(incoming: Path, contents: Mapping[Path, memoryview], now_ns: int) -> None:
    directories = dict.fromkeys(path.parent for path in contents)
    above = {path.parent for path in directories if _is_new(path)}
    temporaries: dict[Path, str] = {}
    try:
        with contextlib.ExitStack() as opened:
            fds = []
            for path, content in contents.items():
                fd, temporaries[path] = tempfile.mkstemp(dir=incoming)  # 0600
                opened.enter_context(closed(fd))
                _fill(fd, content, now_ns)
                fds.append(fd)
            for fd in fds:
                os.fsync(fd)
        # Syncing directories is fast here, because syncing the files has already written the journal.
        for path in above:
            sync_directory(path)
        faults.reach("before_object_is_named")
        for path, temporary in temporaries.items():
            os.rename(temporary, path)
    except BaseException:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise
    for path in directories:
        sync_directory(path)


def make_directory(path: Path) -> None:
    """Create a durable directory and its parents, accessible only to the current user."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    if _is_new(path):
        sync_directory(path.parent)


def make_directories(paths: Iterable[Path]) -> None:
    """Create several durable directories with their parents."""
    for path in dict.fromkeys(paths):
        make_directory(path)


def sync_directory(path: Path) -> None:
    """Sync a directory to make its entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with closed(fd):
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some network file systems cannot sync a directory.
                raise


@contextlib.contextmanager
def closed(fd: int) -> Iterator[None]:
    """Close a descriptor after the `with` block, and raise close errors if the block succeeded.

    Network file systems may write data, and report errors, only when a file is closed.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


def _is_new(path: Path) -> bool:
    """Create a directory and return True, or return False if the directory exists."""
    try:
        path.mkdir(mode=_PRIVATE)
    except FileExistsError:
        return False
    return True


def _fill(fd: int, content: memoryview, now_ns: int) -> None:
    done = write_direct(fd, content)
    while done < len(content):
        done += os.write(fd, content[done:])
    os.utime(fd, ns=(now_ns, now_ns))
    os.fchmod(fd, 0o400)
    if sys.platform == "linux":
        # `posix_fadvise` starts the write-back before `fsync` waits for the data. No process needs the object's pages
        # in the page cache.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class MemoryStore(Store):
    """Stores objects in a dictionary in memory.

    `name` is the part of the store's URL after ``memory://``. `capacity_bytes` is the store's capacity, or None without
    a limit.
    """

    def __init__(self, name: str = "", *, clock: Clock | None = None, capacity_bytes: int | None = None) -> None:
        self.url = f"memory://{name}"
        self._clock = clock or SystemClock()
        self._capacity_bytes = capacity_bytes
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._lock = threading.Lock()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes of an object, or a range of the bytes."""
        data = self._objects[check_key(key)][0]
        check_range(key, start, max(0, len(data) - start) if length is None else length)
        return data[start:] if length is None else data[start : start + length]

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects atomically, replacing existing objects."""
        contents = {check_key(key): bytes(check_size(key, data)) for key, data in objects.items()}
        with self._lock:
            free, size = self.free_bytes(), sum(map(len, contents.values()))
            if free is not None and size > free:
                raise StorageError(
                    f"no space left in {self.url}: {size} bytes to write, {free} bytes free",
                    hint="raise the store's capacity, or choose another store",
                )
            now_ns = self._clock.wall_ns()
            self._objects.update((key, (content, now_ns)) for key, content in contents.items())

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys of the given objects that exist in the store."""
        return frozenset(key for key in keys if check_key(key) in self._objects)

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return all objects below `prefix/`."""
        start = check_prefix(prefix) + "/"
        with self._lock:
            found = [Stored(key, len(data), put) for key, (data, put) in self._objects.items() if key.startswith(start)]
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, ignoring objects that do not exist."""
        for key in keys:
            with self._lock:
                self._objects.pop(check_key(key), None)

    def free_bytes(self) -> int | None:
        """Return the free space of the store in bytes, or None without a limit."""
        if self._capacity_bytes is None:
            return None
        return max(0, self._capacity_bytes - sum(len(data) for data, _ in self._objects.values()))
