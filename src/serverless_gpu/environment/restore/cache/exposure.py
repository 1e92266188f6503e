"""Units that trees of links share their files with, and whether somebody has written to those files since.

    unit ─ linked into a tree: `linked` is touched ─ a rank writes through the tree, as root or after chmod
                                                     └▶ the file has another time, or changed after `linked`

A mount is read-only and shows no file of a unit under a path that can be written. A link is the file itself: its owner
can change it, for every environment that has the unit. So a unit that was ever linked is looked at before each use,
file by file. An ordinary write moves a file's time, which is the same for all files of units. A change that puts the
time back moves the kernel's own time of the inode; so does every link made or removed, which is why `linked` is
touched again after ours. What changed after it is read.

Bytecode has times of its own, and comes later: it is suspicious when it was written to after it was linked.

Who makes links looks at each file right before (`link_tree.py`): the directories are listed once for both.

Failure cases: a clock that is set back hides a change that also puts the file's time back; a unit that vanishes
meanwhile (whoever asks for it finds it missing).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from serverless_gpu.environment.restore.cache.cache_directory import Places, locked
from serverless_gpu.environment.restore.cache.shared_metadata import is_added
from serverless_gpu.environment.restore.cache.unpack import MTIME_S

_MTIME_NS = MTIME_S * 10**9
_LINKING_S_MAX = 3600.0


def linking_lock(places: Places) -> Path:
    """Return the lock of whoever makes links to units, removes them, or looks at what they lead to."""
    return places.locks / "linking"


@contextlib.contextmanager
def linking(places: Places) -> Iterator[None]:
    """Be the only one who makes links to units, or decides what a changed time means, while the block runs."""
    with locked(linking_lock(places), wait_s=_LINKING_S_MAX):
        yield


def expose(unit: Path) -> None:
    """Note that links to a unit's files were made, or looked at and found right, until now."""
    with contextlib.suppress(FileNotFoundError):
        os.close(os.open(unit / "linked", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        os.utime(unit / "linked")


def exposed_since(unit: Path) -> int:
    """Return when a unit's links were last known to be right, in the file system's time; 0 when it never had one."""
    try:
        return os.lstat(unit / "linked").st_ctime_ns
    except FileNotFoundError:
        return 0


def suspects(unit: Path, since_ns: int) -> tuple[list[str], list[str]]:
    """Return the files of a unit that may have been written to, by path: its own, and bytecode."""
    own: list[str] = []
    bytecode: list[str] = []
    waiting = [f"{unit}/{area}" for area in ("site", "prefix")]
    while waiting:
        here = waiting.pop()
        found = bytecode if here.endswith("/__pycache__") else own
        try:
            directory = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{here}/{entry.name}")
                    elif not entry.is_symlink() and is_suspect(
                        here, entry.name, entry.stat(follow_symlinks=False), since_ns
                    ):
                        found.append(f"{here}/{entry.name}")
        finally:
            os.close(directory)
    return own, bytecode


def is_suspect(folder: str, name: str, status: os.stat_result, since_ns: int) -> bool:
    """Return whether a file of a unit may have been written to.

    Args:
        folder: its directory; only the last names of the path count.
        name: in it.
        status: of the file.
        since_ns: from `exposed_since`.
    """
    if folder.endswith("/__pycache__"):
        return status.st_mtime_ns > since_ns and status.st_nlink > 1
    if status.st_mtime_ns == _MTIME_NS and status.st_ctime_ns <= since_ns:
        return False
    came_later = status.st_mtime_ns == _MTIME_NS and status.st_nlink == 1 and is_added(f"{folder}/{name}")
    return not came_later
