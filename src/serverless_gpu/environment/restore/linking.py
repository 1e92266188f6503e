"""Filling a directory from units: a hard link per file, a copy where a link is refused, generated files first.

    1 generated files and links   what is there already is not replaced: they win
    2 every directory of units    before any link of a unit exists, so that no path is followed through one
    3 files, two threads          one system call each, relative to open directories
    4 links of units

Where units share a path the first one has it, as in an overlay. Links are refused between file systems (EXDEV), for
files of others (`fs.protected_hardlinks`, EPERM), and past the 65,000th of a file (EMLINK): those files are copied.

Lives here: the work on a fresh directory nobody else knows. Must not: know where it goes, or what a unit is.

Failure cases: any OSError, the directory is then to be thrown away; a directory of one unit that is a file of another
(EnvironmentRejected).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.restore.assembly import Part
from serverless_gpu.errors import EnvironmentRejected

_THREADS = 2
_BATCH_FILES = 400
_REFUSED = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES})
_COPY_BYTES = 8 * 1024 * 1024


class Linked(msgspec.Struct, frozen=True, kw_only=True):
    """How files came into a tree: by links, by copies, and why the first copy was needed.

    Attributes:
        copies: paths of the copied files.
        directories: paths of all directories of the tree.
    """

    linked: int = 0
    why_copied: str = ""
    copies: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()

    @property
    def copied(self) -> int:
        """Return how many files are copies."""
        return len(self.copies)

    def __add__(self, other: Linked) -> Linked:
        return Linked(
            linked=self.linked + other.linked,
            why_copied=self.why_copied or other.why_copied,
            copies=self.copies + other.copies,
            directories=self.directories + other.directories,
        )


class Source(NamedTuple):
    """Where the content of a part comes from: directories, the first of which wins; and whether it is copied anyway."""

    part: Part
    directories: Sequence[Path]
    copies: bool = False


class _Folder(NamedTuple):
    source: str
    target: str
    files: list[str]
    links: list[str]
    copies: bool


def fill(tree: Path, sources: Sequence[Source]) -> Linked:
    """Make a tree.

    Args:
        tree: an empty directory.
        sources: its parts, outer ones first.
    """
    made = {str(tree)}
    for source in sources:
        write_generated(tree / source.part.at, source.part, made)
    folders: list[_Folder] = []
    for source in sources:
        target = str(tree / source.part.at)
        _make_directory(target, made)
        for directory in source.directories:
            folders += _folders(str(directory), target, made, copies=source.copies)
    with ThreadPoolExecutor(_THREADS) as pool:
        results = list(pool.map(_fill_folders, _batches(folders)))
    for folder in folders:
        for name in folder.links:
            with contextlib.suppress(FileExistsError):
                os.symlink(os.readlink(os.path.join(folder.source, name)), os.path.join(folder.target, name))
    return sum(results, Linked(directories=tuple(made)))


def write_generated(directory: Path, part: Part, made: set[str] | None = None) -> None:
    """Write the generated files, links and directories of a part.

    Args:
        directory: made when needed; nothing in it is replaced.
        part: what to write.
        made: directories that are known to be there; those made here are added.
    """
    made = set() if made is None else made
    for below in ("", *part.directories):
        _make_directory(os.path.join(directory, below) if below else str(directory), made)
    for path, content in part.files.items():
        target = os.path.join(directory, path)
        _make_directory(os.path.dirname(target), made)
        mode = 0o555 if path in part.executable else 0o444
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, mode)
    for path, link in part.links.items():
        target = os.path.join(directory, path)
        _make_directory(os.path.dirname(target), made)
        os.symlink(link, target)


def link_new(source: Path, target: Path) -> Linked:
    """Link files that came to one unit into a tree that has its others: bytecode, made later.

    Args:
        source: a directory of a unit.
        target: the same directory in the tree; made when needed.
    """
    made: set[str] = set()
    _make_directory(str(target), made)
    with os.scandir(source) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    files = [name for name in names if name.endswith(".pyc")]  # others are half-written
    return _fill_folders([_Folder(str(source), str(target), files, [], copies=False)])


def _folders(source: str, target: str, made: set[str], *, copies: bool) -> Iterator[_Folder]:
    waiting = [(source, target)]
    while waiting:
        here, there = waiting.pop()
        files: list[str] = []
        links: list[str] = []
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_symlink():
                    links.append(entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    below = f"{there}/{entry.name}"
                    _make_directory(below, made)
                    waiting.append((entry.path, below))
                else:
                    files.append(entry.name)
        yield _Folder(here, there, files, links, copies)


def _batches(folders: Iterable[_Folder]) -> Iterator[list[_Folder]]:
    batch: list[_Folder] = []
    count = 0
    for folder in folders:
        batch.append(folder)
        count += len(folder.files)
        if count >= _BATCH_FILES:
            yield batch
            batch, count = [], 0
    yield batch


def _fill_folders(folders: Sequence[_Folder]) -> Linked:
    linked = 0
    copies: list[str] = []
    why = ""
    for folder in folders:
        if not folder.files:
            continue
        source = os.open(folder.source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        target = os.open(folder.target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in folder.files:
                refusal = "its files are its owner's" if folder.copies else _link(name, source, target)
                if not refusal:
                    linked += 1
                elif refusal is not _THERE and _copy(name, source, target, writable=folder.copies):
                    copies.append(f"{folder.target}/{name}")
                    why = why or refusal
        finally:
            os.close(source)
            os.close(target)
    return Linked(linked=linked, why_copied=why, copies=tuple(copies))


_THERE = "there is one"


def _link(name: str, source: int, target: int) -> str:
    """Link one file; return why it could not be, or ""."""
    try:
        os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except FileExistsError:
        return _THERE
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return error.strerror or "links are refused"
    return ""


def _copy(name: str, source: int, target: int, *, writable: bool) -> bool:
    reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
    try:
        status = os.fstat(reading)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            writing = os.open(name, flags, 0o600, dir_fd=target)
        except FileExistsError:
            return False
        try:
            while os.sendfile(writing, reading, None, _COPY_BYTES):
                pass
            os.fchmod(writing, status.st_mode & 0o555 | (0o200 if writable else 0))
            os.utime(writing, ns=(status.st_mtime_ns, status.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return True


def _make_directory(path: str, made: set[str]) -> None:
    if path in made:
        return
    try:
        os.mkdir(path, 0o755)
        os.chmod(path, 0o755)  # whatever the umask is: others use the tree, too
    except FileExistsError:
        if os.path.islink(path) or not os.path.isdir(path):
            raise EnvironmentRejected(f"{path} is a file in one unit, and a directory in another") from None
    except FileNotFoundError:
        _make_directory(os.path.dirname(path), made)
        _make_directory(path, made)
        return
    made.add(path)
