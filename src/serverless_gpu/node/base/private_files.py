"""Writes files completely or not at all: private files (tokens, keys) and the user's output files.

    write_private     readable by its owner only, durable; with or without replacing an existing file
    replacing_file    a report, a picture, a result: the old file stays if the new one cannot be completed
    read_owned        files of one owner, without following links

Some file systems have no hard links (exFAT, some FUSE and object-storage mounts). Without hard links, a lock on the
directory ensures that a new file does not replace another file. An output path must be a regular file, not a device, a
pipe or a directory. If an output path is a link, the writer replaces the target of the link.

Failure cases: A full disk or a missing permission raises `OSError`. A process that is killed during a write leaves the
target file unchanged. A killed process also leaves a temporary file, whose name begins with a dot and ends with 16
hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from serverless_gpu import faults
from serverless_gpu.errors import InvalidValue

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Error numbers that a file system without hard links returns."""


def write_private(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a private file durably, completely or not at all.

    Creates the parent directory if needed. Without `replace`, the function does not change an existing file, even if
    another process creates the file concurrently.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{_token()}")
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
    """Return a description of other users who can read or change a file, or "". Raises OSError."""
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"the file belongs to another user (uid {status.st_uid})"
    mode = stat.S_IMODE(status.st_mode)
    return f"the file's mode is {mode:04o}, so others can read it" if mode & 0o077 else ""


def refuse_irregular(path: Path) -> None:
    """Raise InvalidValue if a path exists and is not a regular file."""
    if os.path.exists(path) and not os.path.isfile(path):
        hint = "pass the path of a regular file, or a path that does not exist yet"
        raise InvalidValue(f"{path} exists and is not a regular file, so serverless-gpu does not replace it", hint=hint)


@contextlib.contextmanager
def replacing_file(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new, empty file that replaces `path` after a complete write.

    The process's umask applies to `mode`.
    """
    refuse_irregular(path)
    place = path.resolve()
    beside = place.with_name(f".part-{_token()}")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        yield beside
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def _token() -> str:
    """Return random hexadecimal digits."""
    # The module `secrets` would import `random`, which a user's file may replace.
    return os.urandom(8).hex()


def _name_new(beside: Path, path: Path) -> None:
    """Rename a temporary file to its final name unless a file of that name exists."""
    try:
        os.link(beside, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # The kernel releases the directory's lock if the renaming process dies.
            fcntl.flock(directory, fcntl.LOCK_EX)
            if not os.path.lexists(path):
                beside.rename(path)
        finally:
            os.close(directory)


def read_owned(place: Path, owner: int, size_max: int) -> dict[str, bytes]:
    """Return the files of a directory by name, without names that begin with a dot. Raises OSError.

    The directory and its files must belong to the uid `owner`, because a process of root may call this function for
    another account. A link could otherwise lead to a file of root.
    """
    found: dict[str, bytes] = {}
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_uid != owner:
            raise PermissionError(errno.EPERM, "the directory has another owner", str(place))
        for name in sorted(each for each in os.listdir(directory) if not each.startswith(".")):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            with open(file, "rb") as stream:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != owner or status.st_nlink != 1:
                    raise PermissionError(errno.EPERM, "not a single file of the owner", f"{place}/{name}")
                found[name] = stream.read(size_max)
    finally:
        os.close(directory)
    return found
