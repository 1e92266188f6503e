"""Requirements of runs on this machine: the file system of a home, the kernel, and the Python that asks it.

    flock           device locks, one supervisor for each attempt, units of environments   (Lustre needs `-o flock`)
    record locks    SQLite: the database of a server, MLflow's                             (NFS needs lockd)
    symbolic links  environments that are restored                                         (not exFAT, not every FUSE)
    execution       environments that are made of links: compiled modules are mapped from there    (not noexec)
    pidfd           processes are followed by it, so that what is waited for and ended is never another process with
                    the same number; a machine without it runs nothing

An agent and an uplink check them once before they start (`require_for_runs`). Each question about locks makes a file,
asks, and removes it. A file that cannot even be made is not the answer to the question: it is reported like any other
file that cannot be written.

Failure cases, each a sentence that says what helps: the file system refuses; Linux before 5.3; a container's older
seccomp profile; a Python built with older kernel headers.
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
"""The first Linux on which everything that has to work does."""
REFUSED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system without locks."""
LOCAL_DISK = "set SERVERLESS_GPU_HOME to a directory on a local disk"
_MEND = f"{LOCAL_DISK} (Lustre grants file locks when it is mounted with -o flock, NFS when its lock service runs)"
_NEWER_KERNEL = (
    f"Linux {OLDEST} or newer is needed; in a container, a runtime whose seccomp profile allows pidfd_open "
    "(Docker 20.10 or newer, or --security-opt seccomp=unconfined)"
)
_NEWER_BUILD = "use a Python that was built on a newer system: your distribution's, or a new one of conda-forge or uv"


def require_for_runs(home: Home) -> None:
    """Refuse a machine or a home that cannot control runs; raises HardwareError or StorageError."""
    require_pidfd()
    for directory in (home.root, home.sockets()):
        require_flock(directory)


def pidfd_refusal() -> tuple[str, str]:
    """Return why processes cannot be followed by pidfd here, and what helps; two times "" where they can."""
    if not hasattr(os, "pidfd_open"):
        return "this build of Python has no os.pidfd_open", _NEWER_BUILD
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return "", ""  # it is there
        return f"Linux {os.uname().release} refuses pidfd_open here: {error.strerror}", _NEWER_KERNEL
    return "", ""


def require_pidfd() -> None:
    """Refuse (HardwareError) a machine on which processes cannot be followed."""
    refusal, hint = pidfd_refusal()
    if refusal:
        raise HardwareError(f"this machine cannot run ranks: {refusal}", hint=hint)


def flock_refusal(directory: Path) -> str:
    """Return why flock fails for files of a directory, or ""; StorageError if none can be made."""
    return _ask(directory, lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))


def record_lock_refusal(directory: Path) -> str:
    """Return why SQLite cannot lock files of a directory, or ""; StorageError if none can be made."""
    return _ask(directory, lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))


def require_flock(directory: Path) -> None:
    """Refuse (StorageError) a directory whose files cannot be locked."""
    refusal = flock_refusal(directory)
    if refusal:
        raise lock_error(directory, refusal)


def require_record_locks(directory: Path, what: str) -> None:
    """Refuse (StorageError) a directory whose files SQLite cannot lock; `what` names the database."""
    refusal = record_lock_refusal(directory)
    if refusal:
        raise StorageError(
            f"{what} cannot be kept in {directory}: its file system refuses the locks that SQLite needs "
            f"(fcntl: {refusal})",
            hint=_MEND,
        )


def require_symlinks(directory: Path) -> None:
    """Refuse (StorageError) a directory for environments in which no symbolic link can be made."""
    link = directory / f".asked-{os.urandom(8).hex()}"
    try:
        link.symlink_to("nowhere")
        link.unlink()
    except OSError as error:
        raise symlink_error(directory, error, f"environments cannot be restored to {directory}") from error


def symlink_error(directory: Path, error: OSError, what: str) -> StorageError:
    """Return the user's error for a failed symbolic link; `what` names what cannot be done without it."""
    if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        return storage_error(error, directory)
    return StorageError(
        f"{what}: its file system has no symbolic links ({error.strerror})",
        hint="set SERVERLESS_GPU_HOME to a directory on a file system that has them: ext4, xfs, NFS, tmpfs",
    )


def is_noexec(directory: Path) -> bool:
    """Return whether a directory is mounted noexec, which overlays over it do not inherit; OSError."""
    return bool(os.statvfs(directory).f_flag & os.ST_NOEXEC)


def lock_error(place: Path, refusal: str, *, is_home: bool = True) -> StorageError:
    """Return the user's error for a file system that refuses flock.

    `is_home` says whether the place lies in the home, and not where a command was asked to write.
    """
    hint = _MEND if is_home else "name a place on a local disk"
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
