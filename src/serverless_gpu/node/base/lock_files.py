"""Creates, opens, locks and tests lock files in directories that other users can write.

A process holds a flock until all copies of the locked descriptor are closed. A lock test briefly acquires the shared
lock. A process that needs a long-lived lock retries or waits (`mutex`), because a lock test may hold the lock.

Failure cases: If another user has replaced a lock file with a link, a pipe or a second hard link, the functions raise
StorageError. If another process holds the lock for longer than a second, `mutex` continues without the lock. If a lock
cannot be tested, the functions treat the lock as held, because callers may delete free lock files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from serverless_gpu.errors import StorageError

OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # Opening a pipe would block without O_NONBLOCK.
PAUSE_S = 0.005
_MUTEX_TRIES = 200
_NOTE_BYTES_MAX = 4096


def is_held(path: Path) -> bool:
    """Return True if a process holds a file's lock or the test fails. Return False for a missing file."""
    try:
        fd = os.open(path, os.O_RDONLY | OPEN)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return is_taken(fd)
    except OSError:
        return True
    finally:
        os.close(fd)


def held_note(path: Path) -> bytes | None:
    """Return the note of a lock's holder, or None if the lock is free or the file is unreadable."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | OPEN)
        try:
            return read_note(fd) if is_taken(fd) else None
        finally:
            os.close(fd)
    return None


def read_note(fd: int) -> bytes:
    """Return the first bytes of a lock file."""
    return os.pread(fd, _NOTE_BYTES_MAX, 0)


def is_taken(fd: int) -> bool:
    """Return True if another process holds the lock of an open file. Raises OSError.

    The test acquires a shared lock, which the kernel releases when the caller closes the file.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def is_named(directory: int, name: str, fd: int) -> bool:
    """Return True if the path still refers to the open file.

    A cleanup service for temporary directories may have deleted the path.
    """
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=directory, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Open a lock directory. Convert an OSError in the block to a StorageError with the path."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        what = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        raise StorageError(
            f"The lock directory {path} cannot be used{what}: {error.strerror or error}.",
            hint=f"make the lock directory writable for this user: check `ls -la {path}` and the disk's free space",
        ) from error


def hold(path: Path, note: str) -> int | None:
    """Lock a file for the lifetime of this process, and write a note into the file. Raises OSError.

    Creates the lock file if needed. Returns the locked descriptor, or None if another process holds the lock for longer
    than a second.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(_MUTEX_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # A lock test in another process holds the lock for a moment.
            time.sleep(PAUSE_S)
            continue
        os.ftruncate(fd, 0)
        os.pwrite(fd, note.encode(), 0)
        return fd
    os.close(fd)
    return None


@contextlib.contextmanager
def mutex(directory: int, name: str) -> Iterator[int]:
    """Lock a mutex file for the duration of the `with` block.

    If another process holds the lock for over a second, the block runs without the lock.
    """
    with opened(directory, name) as fd:
        for _ in range(_MUTEX_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(PAUSE_S)
        yield fd


@contextlib.contextmanager
def opened(directory: int, name: str) -> Iterator[int]:
    """Open a lock file with `open_file` for the duration of the `with` block."""
    fd = open_file(directory, name)
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(directory: int, name: str) -> int:
    """Open or create a lock file for reading and writing. Raise StorageError for links and special files."""
    fd = _open_or_create(directory, name)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return fd
    os.close(fd)
    raise _planted(name)


def _open_or_create(directory: int, name: str) -> int:
    for _ in range(3):
        try:
            # The first open omits O_CREAT, because in a sticky directory the kernel refuses O_CREAT for other users'
            # files (fs.protected_regular).
            return os.open(name, os.O_RDWR | OPEN, dir_fd=directory)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                return create(directory, name)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _planted(name) from error
            raise
    raise _planted(name)


def create(directory: int, name: str) -> int:
    """Create and open a lock file that every user may open. Raises FileExistsError."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN, 0o666, dir_fd=directory)
    # Network file systems that refuse chmod usually treat all users alike.
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, 0o666)  # The umask removes the permission bits of other users.
    return fd


def _planted(name: str) -> StorageError:
    return StorageError(
        f"The lock file {name} is a link or not a regular file, so serverless-gpu did not create it.",
        hint="find the lock file's owner with `ls -l`, then remove the lock file",
    )
