"""Lists the entries of one directory, or all entries below a directory.

    look   one directory: its mtime (read first, so that a later change shows), files with their stat, odd entries
    walk   all directories below one, as a `Listing`

A directory's *mark* is a digest of its relevant entries: their names, and the size, mtime and inode of files. Bytecode
files do not affect a directory's mark. The first import creates `__pycache__` directories, which changes the mtime of
directories, but not the marks of directories.

The module does not follow links into directories. A link to a file outside of the listed directory (uv with
`--link-mode symlink`) counts as a regular file. The listing reports all other links to outside paths as odd entries,
like devices, sockets and FIFOs. The listing functions never open files.

Failure case: If a directory cannot be read, the listing raises `EnvironmentUnsupported`, which names the directory.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from serverless_gpu.errors import EnvironmentUnsupported

BYTECODE = (".pyc", ".pyo")
_UNUSUAL = frozenset(map(chr, (*range(32), *range(127, 160))))


class ListedFile(NamedTuple):
    """A file or link in a listed directory, with its `stat` values."""

    file: str  # absolute path
    kind: str
    size: int  # Number of bytes in the file. For a link to an outside file, the number of bytes in that file.
    mtime_ns: int
    inode: int
    # Editing a file changes its ctime even if a program restores the mtime. Creating a hard link to a file also changes
    # the file's ctime.
    ctime_ns: int
    target: str = ""  # Target of a symbolic link that the capture stores as a link, else "".


class Directory(NamedTuple):
    """Identity of a listed directory: absolute path, mtime before the listing, and mark (8 bytes)."""

    path: str
    mtime_ns: int
    mark: bytes


class DirectoryListing(NamedTuple):
    """Content of a listed directory: files and subdirectories by name, and skipped names with reasons."""

    directory: Directory
    files: dict[str, ListedFile]
    directories: list[str]
    odd: dict[str, str]


class Listing(msgspec.Struct):
    """All entries below a directory, by relative paths with ``/`` between names."""

    top: str
    files: dict[str, ListedFile] = {}
    directories: dict[str, Directory] = {}  # all listed directories by path, which is "" for the top directory
    odd: dict[str, str] = {}


Keep = Callable[[str, str, bool], bool]
"""Callback that decides if a listing includes an entry.

Its arguments are the relative directory ("" or ending in "/"), the entry's name, and True for a directory.
"""


def keep_all(above: str, name: str, is_directory: bool) -> bool:
    """Return True for all entries except bytecode and the lock file of uv in a `--target` directory."""
    return name != "__pycache__" and not name.endswith(BYTECODE) and (name != ".lock" or bool(above))


def look(directory: str, top: str, keep: Keep = keep_all) -> DirectoryListing:
    """Return the listing of a single directory.

    Links to paths inside of `top` (the listed directory or one of its parents) stay links.
    """
    above = directory[len(top) :].lstrip("/")
    above += "/" if above else ""
    files: dict[str, ListedFile] = {}
    directories: list[str] = []
    odd: dict[str, str] = {}
    marks: list[str] = []
    try:
        mtime_ns = os.stat(directory).st_mtime_ns
        with os.scandir(directory) as entries:
            for entry in entries:
                name = entry.name
                is_directory = entry.is_dir(follow_symlinks=False)
                if not keep(above, name, is_directory):
                    continue
                if is_directory:
                    directories.append(name)
                    marks.append(name)
                    continue
                found = _read_entry(entry, top)
                if isinstance(found, str):
                    odd[name] = found
                    marks.append(f"{name}\0{found}")
                else:
                    files[name] = found
                    marks.append(f"{name}\0{found.size}\0{found.mtime_ns}\0{found.inode}\0{found.target}")
    except OSError as error:
        raise EnvironmentUnsupported(
            f"cannot read the directory {directory}: {error.strerror}",
            hint="make this directory readable, or remove it from sys.path (in a project: name it in .sgpuignore)",
        ) from error
    marks.sort()
    mark = hashlib.blake2b("\0\0".join(marks).encode(errors="surrogateescape"), digest_size=8).digest()
    return DirectoryListing(Directory(directory, mtime_ns, mark), files, directories, odd)


def walk(top: str, keep: Keep = keep_all, start: Iterable[str] = ("",)) -> Listing:
    """Return a listing of all files and directories below a directory.

    The walk starts at the directories in `start`, which are relative paths.
    """
    listing = Listing(top=top, files={}, directories={}, odd={})
    waiting = list(start)
    while waiting:
        relative = waiting.pop()
        seen = look(f"{top}/{relative}" if relative else top, top, keep)
        listing.directories[relative] = seen.directory
        above = f"{relative}/" if relative else ""
        for name, file in seen.files.items():
            listing.files[above + name] = file
        for name, reason in seen.odd.items():
            listing.odd[above + name] = reason
        waiting += [above + name for name in seen.directories]
    return listing


def is_plain(name: str) -> bool:
    """Return True if a name is valid UTF-8 without control characters."""
    if name.isascii() and name.isprintable():
        return True
    return _UNUSUAL.isdisjoint(name) and not any("\ud800" <= letter <= "\udfff" for letter in name)


def show(path: str) -> str:
    """Return a path as text for messages, with invalid bytes and control characters escaped."""
    return path if is_plain(path) else ascii(path)


def read_file(path: str) -> ListedFile | None:
    """Return the `ListedFile` of a path, or None if the path is not a regular file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _file(path, found) if stat.S_ISREG(found.st_mode) else None


def is_inside(path: str, directory: str) -> bool:
    """Return True if a path is the given directory or lies below it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _read_entry(entry: os.DirEntry[str], top: str) -> ListedFile | str:
    """Return the file of a directory entry, or the reason why the capture must leave out the entry."""
    if entry.is_file(follow_symlinks=False):
        return _file(entry.path, entry.stat(follow_symlinks=False))
    if not entry.is_symlink():
        return "the path is a device, a socket or a FIFO"
    path, target = entry.path, os.readlink(entry.path)
    resolved = os.path.realpath(path)
    if is_inside(resolved, os.path.realpath(top)):
        own = os.lstat(path)
        return ListedFile(path, "l", 0, own.st_mtime_ns, own.st_ino, own.st_ctime_ns, target)
    found = read_file(resolved)
    if found is not None:
        return found._replace(file=path)
    return f"the path is a link to {show(target)}, which lies outside of {show(top)} and is not a regular file"


def _file(path: str, found: os.stat_result) -> ListedFile:
    kind = "x" if found.st_mode & stat.S_IXUSR else "f"
    return ListedFile(path, kind, found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)
