"""A tree of links, as it was made: the time of every directory, and what the file system says of its own files.

A file that is replaced, removed or added moves its directory's time; a file that is written to in place is a unit's
(`exposure.py` finds it), or one of the tree's own, generated or copied. Python puts bytecode beside the sources: a
directory whose time has moved is compared name by name, and only a new `__pycache__` is no change.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.environment.restore.assembly import TreePart

_BYTECODE = "__pycache__"


class TreeStamp(msgspec.Struct, frozen=True, kw_only=True):
    """What a tree was when it was made, by paths below it.

    Attributes:
        directories: path → time; `__pycache__` left out.
        files: path → inode, size, time, time of change; of files that only this tree has.
    """

    directories: dict[str, int] = {}
    files: dict[str, tuple[int, int, int, int]] = {}


Folders = Callable[[TreePart], Sequence[Path]]
"""Where the units of a part lie, the first one first."""


def watch(tree: Path, directories: Mapping[str, int], own_files: Iterable[str]) -> TreeStamp:
    """Return what a tree is now.

    Args:
        tree: that was made just now.
        directories: time of each of its directories, by its path relative to it; "" is itself.
        own_files: files that are not links to units, relative.
    """
    return TreeStamp(
        directories={path: time for path, time in directories.items() if not path.endswith(_BYTECODE)},
        files={path: signature(tree / path) for path in own_files},
    )


def signature(path: Path) -> tuple[int, int, int, int]:
    """Return what changes when a file is written to, or another one takes its place."""
    status = os.lstat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def change(tree: Path, watched: TreeStamp, parts: Callable[[], Sequence[TreePart]], folders: Folders) -> str:
    """Return what of a tree has changed, in a few words, or "".

    Args:
        tree: to look at.
        watched: what it was.
        parts: returns what it was made of; asked only when something has changed.
        folders: where units lie.
    """
    for path, known in watched.files.items():
        try:
            if signature(tree / path) != known:
                return f"{path} was written to"
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} is missing"
    moved = []
    root = str(tree)
    for path, time in watched.directories.items():
        try:
            if os.stat(f"{root}/{path}", follow_symlinks=False).st_mtime_ns != time:
                moved.append(path)
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} is missing"
    if not moved:
        return ""
    assembled = parts()
    return next(filter(None, (_difference(tree, path, assembled, folders) for path in moved)), "")


def _difference(tree: Path, path: str, parts: Sequence[TreePart], folders: Folders) -> str:
    """Compare one directory with what it was made of."""
    expected = _expected(path, parts, folders)
    present = set(os.listdir(tree / path)) - {_BYTECODE}
    if surplus := sorted(present - expected.keys()):
        return f"{posixpath.join(path, surplus[0])} was added"
    if missing := sorted(expected.keys() - present - {_BYTECODE}):
        return f"{posixpath.join(path, missing[0])} is missing"
    for name, source in expected.items():
        if source is not None and name in present and not _is_same(tree / path / name, source):
            return f"{posixpath.join(path, name)} is another file"
    return ""


def _expected(path: str, parts: Sequence[TreePart], folders: Folders) -> dict[str, Path | None]:
    """Return the names a directory should have; with the file of a unit that is linked there."""
    found: dict[str, Path | None] = {}
    for part in parts:
        below = _below(part.at, path)
        if below is None:
            if (inner := _below(path, part.at)) is not None:
                found[inner.partition("/")[0]] = None
            continue
        for own in (*part.files, *part.links, *part.directories):
            if (inner := _below(below, own)) is not None and inner:
                found[inner.partition("/")[0]] = None
        for folder in folders(part):
            place = folder / below
            if place.is_dir() and not place.is_symlink():
                for name in os.listdir(place):
                    found.setdefault(name, place / name)
    return found


def _below(above: str, path: str) -> str | None:
    """Return a path relative to one above it, "" for the same, None when it is not below."""
    if not above or path == above:
        return path if not above else ""
    return path[len(above) + 1 :] if path.startswith(f"{above}/") else None


def _is_same(path: Path, source: Path) -> bool:
    here, there = os.lstat(path), os.lstat(source)
    if stat.S_ISDIR(here.st_mode) or stat.S_ISDIR(there.st_mode):
        return stat.S_IFMT(here.st_mode) == stat.S_IFMT(there.st_mode)
    if stat.S_ISLNK(there.st_mode):
        return stat.S_ISLNK(here.st_mode) and os.readlink(path) == os.readlink(source)
    if here.st_nlink == 1:  # a copy
        return (here.st_size, here.st_mtime_ns) == (there.st_size, there.st_mtime_ns)
    return here.st_ino == there.st_ino
