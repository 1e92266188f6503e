"""Stores the state of a captured environment to make the next check fast.

    <key>.index   header │ gate part: snapshot, directories, small files, code │ files part: all stats and digests
                         │ kept part: other facts that a rescan of the interpreter's own library needs

Each environment has one index file. A writer replaces the whole index file with a rename. Readers read the index parts
one by one. A writer may replace the file between two reads. All index parts of one capture therefore share a
*generation*, a random number. Reading the gate part of an index takes 1-2 ms. The background check also reads the files
part. A scan reads all three parts. An index part stores paths as one string with NUL separators, and numbers as arrays
in bytes. Creating 100,000 small objects would take longer than checking the directories. Because the index is only a
cache, readers treat an unreadable part as missing. The module does not call fsync on index files.

The index stores a file time from the last moments before the scan as `UNKNOWN`. Without `UNKNOWN`, a file that changes
twice within one clock tick of the file system would look unchanged. If a stored time is `UNKNOWN`, the check compares
the file's content.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from blake3 import blake3

from serverless_gpu.environment.documents import Snapshot, UnitKind
from serverless_gpu.environment.scan.directory_listing import Directory, ListedFile
from serverless_gpu.environment.scan.distributions import flat_path
from serverless_gpu.environment.scan.roots import Area, ImportRoot, KeptDistribution
from serverless_gpu.json_codec import from_msgpack

_PartT = TypeVar("_PartT")

UNKNOWN = -1
NO_OWNER = 2**32 - 1
"""Owner number of a file that does not belong to a unit."""
_MAGIC = b"sgpu-index-4" + sys.byteorder[:1].encode() + b"\0\0\0"
_HEADER = struct.Struct("<16sQ32sQ32sQ32s")
_TICK_NS = 20_000_000  # Kernels take file times from a clock with ticks of 1 to 10 ms.
# Some file systems store times in seconds. FAT stores times in steps of two seconds.
_COARSE_TICK_NS = 2_000_000_000
_PART_BYTES_MAX = 1024**3
ENTRIES_MAX = 64
"""Maximum number of index files, with one file per environment.

A writer deletes the oldest index files beyond this number.
"""


class Stats(msgspec.Struct, array_like=True):
    """Files with their `stat` values and content digests."""

    paths: str = ""  # Absolute paths of the files, separated by NUL.
    numbers: bytes = b""  # Size, mtime, inode and ctime of each file, as int64, or zeros for a missing file.
    kinds: str = ""  # One letter per file for its kind, as in rows, or "-" for a missing file.
    digests: bytes = b""  # SHA-256 of each file, with zeros for links. Empty if the scan read no content.

    def names(self) -> list[str]:
        """Return the paths of the files."""
        return self.paths.split("\0") if self.paths else []

    def columns(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
        """Return the sizes, mtimes, inodes and ctimes of the files."""
        numbers = memoryview(self.numbers).cast("q").tolist()
        return numbers[::4], numbers[1::4], numbers[2::4], numbers[3::4]

    def pick(self, chosen: Iterable[int]) -> Stats:
        """Return the files with the given indices, without digests."""
        chosen, names = tuple(chosen), self.names()
        return Stats(
            paths="\0".join(names[number] for number in chosen),
            numbers=b"".join(self.numbers[32 * number : 32 * number + 32] for number in chosen),
            kinds="".join(self.kinds[number] for number in chosen),
        )


class GatePart(msgspec.Struct, array_like=True):
    """The data with which the gate decides if an environment is unchanged."""

    generation: bytes  # random number of 16 bytes, which the matching files part also contains
    key: bytes
    snapshot: Snapshot
    areas: tuple[Area, ...]
    directories: str  # absolute paths of the directories, separated by NUL
    areas_of: bytes
    mtimes: bytes
    marks: bytes  # marks of the directories, 8 bytes per directory
    small: Stats
    code: Stats
    absent: str  # directories and files of `sys.path` that do not exist, separated by NUL

    def directory_names(self) -> list[str]:
        """Return the paths of the directories."""
        return self.directories.split("\0") if self.directories else []


class UnitOwner(msgspec.Struct, frozen=True, array_like=True):
    """A unit that owns files: the directory and prefix of its root, and the unit's captured identity."""

    site: str
    prefix: str
    kind: UnitKind
    name: str
    version: str
    address: str

    def row_path(self, file: str) -> str:
        """Return the row path of a library file."""
        if file.startswith(self.site + "/"):
            path = file[len(self.site) + 1 :]
            return flat_path(path) if self.site == self.prefix else f"site/{path}"
        return f"prefix/{file[len(self.prefix) + 1 :]}"


class FilesPart(msgspec.Struct, array_like=True):
    """The `stat` values and digests of all library files."""

    generation: bytes
    files: Stats
    owners_of: bytes  # owner number of each file, as uint32
    owners: tuple[UnitOwner, ...]

    def owner(self, number: int) -> UnitOwner:
        """Return the unit that owns a library file."""
        return self.owners[memoryview(self.owners_of).cast("I")[number]]


class KeptPart(msgspec.Struct, array_like=True):
    """Other data that a rescan of the standard library's root needs.

    The data are empty if the interpreter is not in a virtual environment.
    """

    generation: bytes
    spot: ImportRoot | None = None  # root of the library, or None if the index has no data about the library
    inodes: bytes = b""
    others: Stats = msgspec.field(default_factory=Stats)  # Library files that do not belong to a unit, without digests.
    others_of: bytes = b""  # Owner number of each file in `others`, or `NO_OWNER`, as uint32.
    distributions: tuple[KeptDistribution, ...] = ()


class IndexFile:
    """An index file whose parts a reader can load separately."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_gate(self) -> GatePart | None:
        """Return the gate part of the index, or None if the part is missing."""
        return self._read(0, GatePart)

    def read_files(self) -> FilesPart | None:
        """Return the files part of the index, or None if the part is missing."""
        return self._read(1, FilesPart)

    def read_kept(self) -> KeptPart | None:
        """Return the kept part of the index, or None if the part is missing."""
        return self._read(2, KeptPart)

    def write(self, gate: GatePart, files: FilesPart, kept: KeptPart) -> None:
        """Replace the index file, and delete the oldest index files."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        parts = [msgspec.msgpack.encode(part) for part in (gate, files, kept)]
        header = _HEADER.pack(_MAGIC, *(field for part in parts for field in (len(part), blake3(part).digest())))
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(b"".join((header, *parts)))
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        with contextlib.suppress(OSError):  # Another process may delete the same index files at the same time.
            found = sorted(self.path.parent.glob("*.index"), key=lambda path: path.stat().st_mtime_ns)
            for path in found[:-ENTRIES_MAX]:
                path.unlink(missing_ok=True)

    def renew(self, gate: GatePart | None = None, files: FilesPart | None = None) -> None:
        """Replace one part of the index with newer data of the same capture, and ignore write errors.

        If another process has stored a newer capture, the function discards the data. The function may overwrite a
        capture that another process stores just before the rename. The next check finds the change again, because the
        remaining parts still match their own capture.
        """
        old_gate, old_files, kept = self.read_gate(), self.read_files(), self.read_kept()
        if old_gate is None or old_files is None or kept is None:
            return
        gate, files = gate or old_gate, files or old_files
        if len({part.generation for part in (gate, files, kept, old_gate, old_files)}) > 1:
            return
        with contextlib.suppress(OSError):  # If the disk is full, the next check only takes a few milliseconds longer.
            self.write(gate, files, kept)

    def _read(self, number: int, kind: type[_PartT]) -> _PartT | None:
        try:
            with open(self.path, "rb", buffering=0) as file:
                magic, *fields = _HEADER.unpack(file.read(_HEADER.size))
                length, digest = fields[2 * number : 2 * number + 2]
                if magic != _MAGIC or length > _PART_BYTES_MAX:
                    return None
                file.seek(_HEADER.size + sum(fields[: 2 * number : 2]))
                part = file.read(length)
            return from_msgpack(part, kind) if blake3(part).digest() == digest else None
        except (OSError, struct.error, msgspec.DecodeError):
            return None


def pack_stats(files: Iterable[tuple[str, ListedFile | None, bytes]], seen_ns: int) -> Stats:
    """Convert files to stored form, from path, stat (None if missing) and SHA-256 (b"" if unknown)."""
    paths: list[str] = []
    kinds: list[str] = []
    numbers = array("q")
    digests: list[bytes] = []
    for path, file, sha256 in files:
        paths.append(path)
        digests.append(sha256)
        kinds.append(file.kind if file else "-")
        if file is None:
            numbers.extend((0, 0, 0, 0))
        else:
            times = known_mtime(file.mtime_ns, seen_ns), known_mtime(file.ctime_ns, seen_ns)
            numbers.extend((file.size, times[0], file.inode, times[1]))
    return Stats("\0".join(paths), numbers.tobytes(), "".join(kinds), b"".join(digests))


def known_mtime(mtime_ns: int, seen_ns: int) -> int:
    """Return an mtime or ctime, or `UNKNOWN` if a later change might leave the value the same.

    `seen_ns` is the start time of the scan that read the mtime or ctime.
    """
    tick_ns = _COARSE_TICK_NS if mtime_ns % 1_000_000_000 == 0 else _TICK_NS
    return UNKNOWN if mtime_ns > seen_ns - tick_ns else mtime_ns


def pack_directories(directories: Sequence[tuple[int, Directory]], seen_ns: int) -> tuple[str, bytes, bytes, bytes]:
    """Convert directories to stored form: names, areas, mtimes and marks."""
    names = "\0".join(directory.path for _, directory in directories)
    areas = array("H", (area for area, _ in directories)).tobytes()
    mtimes = array("q", (known_mtime(directory.mtime_ns, seen_ns) for _, directory in directories)).tobytes()
    return names, areas, mtimes, b"".join(directory.mark for _, directory in directories)
