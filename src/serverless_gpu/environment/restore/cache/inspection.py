"""Whether a unit on the disk is what its rows say: by what the file system says of each file, or by reading them all.

An ordinary write changes a file's time, and the time of every file of a unit is the same; a failing disk, or somebody
who sets the time back, is found by reading. Only bytecode beside the sources, and what `shared_metadata.py` adds, may
have come since.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serverless_gpu.environment.documents import FileRow
from serverless_gpu.environment.restore.cache.shared_metadata import is_added
from serverless_gpu.environment.restore.cache.unpack import MTIME_S

_THREADS = 2
_READ_BYTES = 1024 * 1024


def damage(directory: Path, rows: Sequence[FileRow], *, read: bool) -> str:
    """Return what is wrong with a unit, one sentence about the first thing found, or "".

    Args:
        directory: of the unit, with its areas.
        rows: what it should hold.
        read: whether to read every file; else only its kind, size, time and mode are looked at.
    """
    expected = {row.path: row for row in rows}
    directories = _directories(rows)
    for path, status in _found(directory):
        row = expected.pop(path, None)
        wrong = _difference(directory, path, status, row) if row else _surplus(path, status, directories)
        if wrong:
            return f"{path} {wrong}"
    if expected:
        return f"{next(iter(expected))} is missing"
    return _unequal(directory, rows) if read else ""


def drop_bytecode(directory: Path) -> None:
    """Remove the bytecode of a unit."""
    for path, status in list(_found(directory)):
        if _is_bytecode(path) and stat.S_ISREG(status.st_mode):
            (directory / path).unlink(missing_ok=True)


def _found(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    waiting = [area for area in ("site", "prefix") if (directory / area).is_dir()]
    while waiting:
        here = waiting.pop()
        with os.scandir(directory / here) as entries:
            for entry in entries:
                path = f"{here}/{entry.name}"
                yield path, entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)


def _directories(rows: Iterable[FileRow]) -> set[str]:
    found: set[str] = set()
    for row in rows:
        above = row.path.rpartition("/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def _difference(directory: Path, path: str, status: os.stat_result, row: FileRow) -> str:
    mode = status.st_mode
    if row.kind == "d":
        return "" if stat.S_ISDIR(mode) else "is no directory"
    if row.kind == "l":
        same = stat.S_ISLNK(mode) and os.readlink(directory / path) == row.target
        return "" if same else f"is not the link to {row.target}"
    if not stat.S_ISREG(mode):
        return "is no file"
    if status.st_size != row.size:
        return f"has {status.st_size} bytes instead of {row.size}"
    if status.st_mtime_ns != MTIME_S * 10**9:
        return "was written to"
    wanted = 0o555 if row.kind == "x" else 0o444
    return "" if stat.S_IMODE(mode) == wanted else f"has the mode {stat.S_IMODE(mode):o} instead of {wanted:o}"


def _surplus(path: str, status: os.stat_result, directories: set[str]) -> str:
    if stat.S_ISDIR(status.st_mode) and (path in directories or path.endswith("/__pycache__")):
        return ""
    if stat.S_ISREG(status.st_mode) and is_added(path):
        return "" if status.st_mtime_ns == MTIME_S * 10**9 else "was written to"
    return "" if stat.S_ISREG(status.st_mode) and _is_bytecode(path) else "does not belong there"


def _is_bytecode(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder.endswith("/__pycache__") and ".pyc" in name  # half-written ones end in a number


def _unequal(directory: Path, rows: Sequence[FileRow]) -> str:
    files = [row for row in rows if row.has_content]
    with ThreadPoolExecutor(_THREADS) as pool:
        for row, digest in zip(files, pool.map(lambda row: _digest(directory / row.path), files), strict=True):
            if digest != row.sha256:
                return f"{row.path} holds other bytes"
    return ""


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.digest()
