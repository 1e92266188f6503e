"""Checks this machine's requirements for runs: the home's file system, the kernel and Python.

    flock           device locks, one supervisor for each attempt, units of environments   (Lustre needs `-o flock`)
    record locks    SQLite: the database of a server, MLflow's                             (NFS needs lockd)
    symbolic links  restored environments                                                  (not exFAT, not every FUSE)
    execution       environments made of links: compiled modules are mapped from there     (not noexec)
    pidfd           identifies processes, so that a wait or a kill never affects a later process with the same
                    number; without pidfd, a machine cannot run anything

The agent and the uplink check these requirements at start (`require_for_runs`). A lock test locks and removes a
temporary file. If the temporary file cannot be created, the lock test raises the usual write error.

The checks fail on a file system without locks or links, or on Linux before 5.3. The checks also fail in a container
with an old seccomp profile, or with a Python built with old kernel headers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from serverless_gpu.errors import HardwareError, StorageError
from serverless_gpu.node.base.home import Home, storage_error

OLDEST = "5.3"
"""First Linux version with all features that runs require."""
REFUSED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Error numbers that a file system without lock support returns."""
LOCAL_DISK = "set SERVERLESS_GPU_HOME to a directory on a local disk"
_MEND = f"{LOCAL_DISK} (Lustre supports file locks if mounted with -o flock, NFS if its lock service runs)"
_NEWER_KERNEL = (
    f"use Linux {OLDEST} or newer, and in a container a runtime whose seccomp profile allows pidfd_open (Docker "
    "20.10 or newer, or --security-opt seccomp=unconfined)"
)
_NEWER_BUILD = "use a Python that was built on a newer system, from your distribution, conda-forge or uv"


def require_for_runs(home: Home) -> None:
    """Check that this machine and home directory support runs. Raises HardwareError or StorageError."""
    require_pidfd()
    for directory in (home.root, home.sockets()):
        require_flock(directory)


def pidfd_refusal() -> tuple[str, str]:
    """Return the reason why pidfd does not work on this machine and the remedy, or two empty strings."""
    if not hasattr(os, "pidfd_open"):
        return "this build of Python has no os.pidfd_open", _NEWER_BUILD
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            # The call failed because this process has too many open files, although the kernel supports pidfd.
            return "", ""
        return f"Linux {os.uname().release} refuses pidfd_open here: {error.strerror}", _NEWER_KERNEL
    return "", ""


def require_pidfd() -> None:
    """Raise HardwareError if this system does not support pidfd."""
    refusal, hint = pidfd_refusal()
    if refusal:
        raise HardwareError(f"this machine cannot run ranks: {refusal}", hint=hint)


def flock_refusal(directory: Path) -> str:
    """Return the reason why flock fails in a directory, or "". Raises StorageError."""
    return _ask(directory, lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))


def record_lock_refusal(directory: Path) -> str:
    """Return the reason why SQLite cannot lock files in a directory, or "".

    Raises StorageError if no file can be created.
    """
    return _ask(directory, lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))


def require_flock(directory: Path) -> None:
    """Raise StorageError if a process cannot lock files in a directory."""
    refusal = flock_refusal(directory)
    if refusal:
        raise lock_error(directory, refusal)


def require_record_locks(directory: Path, what: str) -> None:
    """Raise StorageError if SQLite cannot lock files in a directory.

    `what` names the database.
    """
    refusal = record_lock_refusal(directory)
    if refusal:
        raise StorageError(
            f"{what} cannot be kept in {directory}: its file system refuses the locks that SQLite needs "
            f"(fcntl: {refusal})",
            hint=_MEND,
        )


def require_symlinks(directory: Path) -> None:
    """Raise StorageError if a directory for environments does not support symbolic links."""
    link = directory / f".asked-{os.urandom(8).hex()}"
    try:
        link.symlink_to("nowhere")
        link.unlink()
    except OSError as error:
        raise symlink_error(directory, error, f"environments cannot be restored to {directory}") from error


def symlink_error(directory: Path, error: OSError, what: str) -> StorageError:
    """Return a user-facing error for a failed creation of a symbolic link.

    `what` describes the failed operation.
    """
    if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        return storage_error(error, directory)
    return StorageError(
        f"{what}: its file system has no symbolic links ({error.strerror})",
        hint="set SERVERLESS_GPU_HOME to a directory on a file system with symbolic links: ext4, xfs, NFS, tmpfs",
    )


def is_noexec(directory: Path) -> bool:
    """Return True if a directory is mounted noexec. Raises OSError.

    Overlay mounts do not inherit the noexec option.
    """
    return bool(os.statvfs(directory).f_flag & os.ST_NOEXEC)


def lock_error(place: Path, refusal: str, *, is_home: bool = True) -> StorageError:
    """Return a user-facing error for a file system that refuses flock.

    If the user passed the path to a command, `is_home` is False.
    """
    hint = _MEND if is_home else "pass a path on a local disk"
    return StorageError(f"{place} cannot be used: its file system refuses file locks (flock: {refusal})", hint=hint)


def _ask(directory: Path, lock: Callable[[int], None]) -> str:
    with _new_file(directory) as fd:
        try:
            lock(fd)
        except OSError as error:
            return error.strerror or str(error)
    return ""


@contextlib.contextmanager
def _new_file(directory: Path) -> Iterator[int]:
    path = directory / f".asked-{os.urandom(8).hex()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise storage_error(error, path) from error
    try:
        yield fd
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()
