"""Detects modified units by seals of mounted units, link times of linked units, and file digests.

    unit unpacked, every byte verified ─ seal ─▶ note
    later: one sweep over the unit ─▶ the same seal? no file was modified
                                    └ another seal ─▶ read every byte (`damage`)

    unit ─ linked into a tree: `linked` is touched ─ a rank writes through the tree, as root or after chmod
                                                     └▶ the file has another time, or changed after `linked`

A unit's seal is a digest of all file metadata, computed during the verification of the file contents. Ranks cannot
write to a unit through a mount. Processes of the cache's owner can write to the cache directory. Every write updates
the inode's change time, which no system call can set. A replaced file or directory has a different inode. Comparing the
seal therefore detects modified and replaced files without reading the contents.

The owner of a hard-linked file can modify the file for every environment that contains the unit. Before each use, the
cache therefore checks every file of a linked unit (`suspects`). An ordinary write is visible, because all files of
units have the same modification time. A write that restores the modification time still updates the change time.
Creating or removing a link also updates the change time. The cache therefore touches the file `linked` after it creates
links. A check reads every file with a later change time. `link_tree.py` checks each file immediately before linking the
file.

The cache compiles bytecode after it has sealed a unit, and records each bytecode file after the compilation. Bytecode
of a linked unit is suspicious if its modification time is later than the last link. `unit_metadata.py` also adds files
to sealed units. `unit_cache.py` handles modified units.

Failure cases: A process with the uid of the cache's owner can forge the records. Users who distrust each other
therefore need separate uids. If the system clock was set back, the check can miss a modification of a linked unit that
restores the file's modification time.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from serverless_gpu.environment.documents import FileRow
from serverless_gpu.environment.restore.cache.cache_directory import CachePaths, locked, read_document, write_document
from serverless_gpu.environment.restore.cache.unit_metadata import is_added
from serverless_gpu.environment.restore.cache.unpack import MTIME_S

LOOK_S = 600
"""Seconds after which the cache checks a unit again within one boot."""
BYTECODE = "bytecode"
_DOCUMENTS = ("unit", "outline")
_ADDED_ENDINGS = ("RECORD", "INSTALLER", ".sgpu")
Identity = tuple[int, int, int, int, int]
"""Inode, size, modification time, change time and mode of a file."""
_MTIME_NS = MTIME_S * 10**9
_LINKING_S_MAX = 3600.0
_THREADS = 2
_READ_BYTES = 1024 * 1024


class Sweep(NamedTuple):
    """Metadata of all files of a unit at one point in time."""

    files: bytes  # Digest of the identities of the unit's files, links and directories.
    documents: bytes
    bytecode: dict[str, Identity]  # Identity of each bytecode file by path in the unit.


def sweep_unit(unit: Path) -> Sweep:
    """Collect the metadata of all files of a unit."""
    top = str(unit)
    digest = blake3()
    bytecode: dict[str, Identity] = {}
    waiting = [area for area in ("site", "prefix") if os.path.isdir(f"{top}/{area}")]
    while waiting:
        here = waiting.pop()
        is_cache = here.endswith("/__pycache__")
        with os.scandir(f"{top}/{here}") as entries:
            found = sorted(entries, key=operator.attrgetter("name"))
        seen: list[str | Identity | int] = []
        for entry in found:
            name, status = entry.name, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{here}/{name}")
                if name != "__pycache__":
                    seen += name, status.st_ino
            elif is_cache and ".pyc" in name:
                bytecode[f"{here}/{name}"] = _identity(status)
            elif name.endswith(_ADDED_ENDINGS) and is_added(f"{here}/{name}"):
                continue
            else:
                seen += name, _identity(status)
        if seen or not is_cache:
            digest.update(_bytes(here, seen))
    documents = msgspec.msgpack.encode([_identity(os.lstat(unit / name)) for name in _DOCUMENTS])
    return Sweep(digest.digest(), blake3(documents).digest(), bytecode)


def note_bytecode(unit: Path, targets: Iterable[str]) -> None:
    """Record newly compiled bytecode. The caller holds the unit's lock.

    `targets` contains absolute paths. The function skips missing files, which did not compile.
    """
    known = dict(known_bytecode(unit))
    for target in targets:
        try:
            known[os.path.relpath(target, unit)] = _identity(os.lstat(target))
        except FileNotFoundError:
            continue
    write_document(unit / BYTECODE, known)


def known_bytecode(unit: Path) -> dict[str, Identity]:
    """Return the recorded identities of a unit's bytecode files."""
    return read_document(unit / BYTECODE, dict[str, Identity]) or {}


def _bytes(here: str, seen: list[str | Identity | int]) -> bytes:
    try:
        return msgspec.msgpack.encode((here, seen))
    except UnicodeEncodeError:  # No recorded seal matches an invalid name, because valid units have UTF-8 names.
        return ascii((here, seen)).encode()


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode


def linking_lock(places: CachePaths) -> Path:
    """Return the lock for creating, removing or checking links to files of units."""
    return places.locks / "linking"


@contextlib.contextmanager
def linking(places: CachePaths) -> Iterator[None]:
    """Hold the linking lock while the block runs.

    Only the lock holder may create links to files of units, or interpret changed file times.
    """
    with locked(linking_lock(places), wait_s=_LINKING_S_MAX):
        yield


def expose(unit: Path) -> None:
    """Record that all links to a unit's files are new or verified."""
    with contextlib.suppress(FileNotFoundError):
        os.close(os.open(unit / "linked", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        os.utime(unit / "linked")


def exposed_since(unit: Path) -> int:
    """Return the time of a unit's last `expose` call on the file system's clock, or 0."""
    try:
        return os.lstat(unit / "linked").st_ctime_ns
    except FileNotFoundError:
        return 0


def suspects(unit: Path, since_ns: int) -> tuple[list[str], list[str]]:
    """Return the paths of possibly modified files of a unit, separately for unit files and bytecode."""
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
    """Return True if the metadata of a unit's file shows a possible modification.

    `folder` is a path that ends with the file's directory in the unit. `since_ns` comes from `exposed_since`.
    """
    if folder.endswith("/__pycache__"):
        return status.st_mtime_ns > since_ns and status.st_nlink > 1
    if status.st_mtime_ns == _MTIME_NS and status.st_ctime_ns <= since_ns:
        return False
    came_later = status.st_mtime_ns == _MTIME_NS and status.st_nlink == 1 and is_added(f"{folder}/{name}")
    return not came_later


def damage(directory: Path, rows: Sequence[FileRow], *, read: bool) -> str:
    """Describe the first damaged file of a unit, or return "".

    If `read` is set, compare the content of every file, otherwise only kind, size, time and mode.
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
        return "" if stat.S_ISDIR(mode) else "is not a directory"
    if row.kind == "l":
        same = stat.S_ISLNK(mode) and os.readlink(directory / path) == row.target
        return "" if same else f"is not the link to {row.target}"
    if not stat.S_ISREG(mode):
        return "is not a file"
    if status.st_size != row.size:
        return f"has {status.st_size} bytes instead of {row.size}"
    if status.st_mtime_ns != MTIME_S * 10**9:
        return "was modified"
    wanted = 0o555 if row.kind == "x" else 0o444
    return "" if stat.S_IMODE(mode) == wanted else f"has the mode {stat.S_IMODE(mode):o} instead of {wanted:o}"


def _surplus(path: str, status: os.stat_result, directories: set[str]) -> str:
    if stat.S_ISDIR(status.st_mode) and (path in directories or path.endswith("/__pycache__")):
        return ""
    if stat.S_ISREG(status.st_mode) and is_added(path):
        return "" if status.st_mtime_ns == MTIME_S * 10**9 else "was modified"
    return "" if stat.S_ISREG(status.st_mode) and _is_bytecode(path) else "does not belong to the unit"


def _is_bytecode(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    # Compiler processes append a number to the names of unfinished files.
    return folder.endswith("/__pycache__") and ".pyc" in name


def _unequal(directory: Path, rows: Sequence[FileRow]) -> str:
    files = [row for row in rows if row.has_content]
    with ThreadPoolExecutor(_THREADS) as pool:
        for row, digest in zip(files, pool.map(lambda row: _digest(directory / row.path), files), strict=True):
            if digest != row.sha256:
                return f"{row.path} has different content"
    return ""


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.digest()
