"""Writes files whole: private ones (tokens, keys), and output files at paths that the user gives.

    write_private     readable by its owner only, durable; with or without replacing an existing file
    replacing_file    a report, a picture, a result: the old file stays if the new one cannot be completed

Where the file system has no hard links (exFAT, some FUSE and object-storage mounts), files that must not replace others
are given their names under a lock on their directory. An output path that is no regular file (a device, a pipe, a
directory) is refused; a link stays, and its target is written.

Failure cases: a full disk, no permission (`OSError`); a process killed in the middle leaves a file that begins with a
dot and ends with 16 digits, and the one of the right name as it was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from serverless_gpu import faults
from serverless_gpu.errors import InvalidValue

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of a file system without hard links."""


def write_private(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a file durably and whole that only its owner can read; its directory is made if needed.

    Without `replace`, an existing file stays, also one that another process makes meanwhile.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        faults.reach("before_file_is_named")
        if replace:
            beside.replace(path)
        else:
            _name_new(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def readers(path: Path) -> str:
    """Return who else but this user can read or change a file, or ""; raises OSError."""
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user (uid {status.st_uid})"
    mode = stat.S_IMODE(status.st_mode)
    return f"its mode is {mode:04o}, so others can read it" if mode & 0o077 else ""


def refuse_irregular(path: Path) -> None:
    """Raise InvalidValue if a path exists and is no regular file."""
    if os.path.exists(path) and not os.path.isfile(path):
        hint = "give the path of a file, or one at which there is nothing yet"
        raise InvalidValue(f"{path} is there and is no file: it is left as it is", hint=hint)


@contextlib.contextmanager
def replacing_file(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new, empty file that replaces `path` after a complete write; `mode` is subject to the umask."""
    refuse_irregular(path)
    place = path.resolve()
    beside = place.with_name(f".part-{secrets.token_hex(8)}")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        yield beside
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def _name_new(beside: Path, path: Path) -> None:
    """Give a file its name unless another one has it."""
    try:
        os.link(beside, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)  # held by who is just naming a file; it ends with them
            if not os.path.lexists(path):
                beside.rename(path)
        finally:
            os.close(directory)
