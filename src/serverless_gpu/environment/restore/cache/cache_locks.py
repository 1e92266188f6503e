"""Locks of the cache: files whose flock says who makes, or uses, what; the kernel lets go of it when its holder dies.

A lock file may be removed by whoever holds it exclusively, so whoever gets a lock looks whether the file is still the
one that has the name, and tries again if not. Descriptors are not inherited by programs that are executed, unless
handed on.

Lives here: taking, trying, waiting with a bound. Must not: know what a lock stands for.

Failure cases: a holder that keeps it for longer than the bound (StorageError naming the file); a directory that cannot
be written (StorageError).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from serverless_gpu.errors import StorageError

_PAUSE_S = 0.002
_PAUSE_S_MAX = 0.05
_TRIES = 100


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """Return a descriptor that holds the lock, or None when somebody else has it.

    Args:
        path: the lock file, made when needed.
        shared: with others who use the same thing, instead of alone.
    """
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
        if _is_still_there(path, fd):
            return fd
        os.close(fd)
    raise StorageError(f"The lock file {path} is removed again and again.")


def lock(path: Path, *, shared: bool = False, wait_s: float) -> int:
    """Return a descriptor that holds the lock, once it is free.

    Args:
        path: the lock file, made when needed.
        shared: with others who use the same thing, instead of alone.
        wait_s: for how long.

    Raises:
        StorageError: somebody has kept it for longer.
    """
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


def _is_still_there(path: Path, fd: int) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))
