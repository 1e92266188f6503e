"""What was seen when an environment was captured, kept so that the next look is short.

    <key>.index   header │ gate part: snapshot, directories, small files, code │ files part: all stats and digests
                         │ kept part: what a second look at the interpreter's own library has to know besides

One file per environment, replaced whole (temporary name, rename). Its parts are read one by one, and processes may
remember at the same time: what goes together has the same *generation*, a number made at each capture. Reading the gate
part takes 1-2 ms; the files part is read by the background check, all three by a scan. Paths are one string with NUL
between them, numbers are arrays as bytes: 100,000 small objects would take longer to make than the directories to look
at. It is a memory, not a promise: what cannot be read (another version, torn by a power cut, altered) was never seen,
and nothing is fsynced.

An mtime or ctime from the last moments before the look is kept as `UNKNOWN`: a file changed once more in the same tick
of the file system's clock would look the same. A comparison looks at the content instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from blake3 import blake3

from serverless_gpu.environment.documents import FileRow, Snapshot, SnapshotMember, UnitKind
from serverless_gpu.environment.scan.directory_listing import Digest, Directory, ListedFile, digest_files, read_file
from serverless_gpu.environment.scan.distributions import Distribution, flat_path, row_path
from serverless_gpu.environment.scan.roots import Area, ImportRoot, KeptDistribution, Survey
from serverless_gpu.environment.scan.stdlib_rescan import IndexParts, directory_inodes, reusable
from serverless_gpu.errors import EnvironmentUnsupported
from serverless_gpu.json_codec import from_msgpack

_PartT = TypeVar("_PartT")

UNKNOWN = -1
NO_OWNER = 2**32 - 1
"""In place of an owner's number."""
_MAGIC = b"sgpu-index-4" + sys.byteorder[:1].encode() + b"\0\0\0"
_HEADER = struct.Struct("<16sQ32sQ32sQ32s")
_TICK_NS = 20_000_000  # kernels count in ticks of 1 to 10 ms
_COARSE_TICK_NS = 2_000_000_000  # file systems that count in seconds, FAT in two
_PART_BYTES_MAX = 1024**3
ENTRIES_MAX = 64
"""Environments that are remembered; the oldest are forgotten."""


class Stats(msgspec.Struct, array_like=True):
    """Files with their stat, and what their content was."""

    paths: str = ""  # absolute, NUL between them
    numbers: bytes = b""  # size, mtime, inode and ctime of each, as int64; all 0 for a file that was not there
    kinds: str = ""  # one letter for each, as in rows; "-" for a file that was not there
    digests: bytes = b""  # SHA-256 of each, 32 bytes (zeros for links); empty where no content was looked at

    def names(self) -> list[str]:
        """Return the paths."""
        return self.paths.split("\0") if self.paths else []

    def columns(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
        """Return sizes, mtimes, inodes and ctimes."""
        numbers = memoryview(self.numbers).cast("q").tolist()
        return numbers[::4], numbers[1::4], numbers[2::4], numbers[3::4]

    def pick(self, chosen: Iterable[int]) -> Stats:
        """Return some of the files, by their numbers, without digests."""
        chosen, names = tuple(chosen), self.names()
        return Stats(
            paths="\0".join(names[number] for number in chosen),
            numbers=b"".join(self.numbers[32 * number : 32 * number + 32] for number in chosen),
            kinds="".join(self.kinds[number] for number in chosen),
        )


class GatePart(msgspec.Struct, array_like=True):
    """What decides at once whether an environment is unchanged."""

    generation: bytes  # of this and the files part that goes with it, 16 bytes
    key: bytes
    snapshot: Snapshot
    areas: tuple[Area, ...]
    directories: str  # absolute, NUL between them
    areas_of: bytes
    mtimes: bytes
    marks: bytes  # of each, 8 bytes
    small: Stats
    code: Stats
    absent: str  # entries of `sys.path` that were not there, NUL between them

    def directory_names(self) -> list[str]:
        """Return the directories."""
        return self.directories.split("\0") if self.directories else []


class UnitOwner(msgspec.Struct, frozen=True, array_like=True):
    """A unit that files belong to: directory and prefix of its root, and what it was captured as."""

    site: str
    prefix: str
    kind: UnitKind
    name: str
    version: str
    address: str

    def row_path(self, file: str) -> str:
        """Return the path of a file's row."""
        if file.startswith(self.site + "/"):
            path = file[len(self.site) + 1 :]
            return flat_path(path) if self.site == self.prefix else f"site/{path}"
        return f"prefix/{file[len(self.prefix) + 1 :]}"


class FilesPart(msgspec.Struct, array_like=True):
    """Every file of the libraries."""

    generation: bytes
    files: Stats
    owners_of: bytes  # for each file the number of its owner, as uint32
    owners: tuple[UnitOwner, ...]

    def owner(self, number: int) -> UnitOwner:
        """Return what a file belongs to."""
        return self.owners[memoryview(self.owners_of).cast("I")[number]]


class KeptPart(msgspec.Struct, array_like=True):
    """What `stdlib_rescan.py` needs besides: nothing of a library that is no virtual environment of its own."""

    generation: bytes
    spot: ImportRoot | None = None  # the library; None where there is nothing to go by
    inodes: bytes = b""
    others: Stats = msgspec.field(default_factory=Stats)  # files of the library that are in no unit; without digests
    others_of: bytes = b""  # for each the number of the owner that claims it, or `NO_OWNER`, as uint32
    distributions: tuple[KeptDistribution, ...] = ()


class IndexFile:
    """One file of the index, by path; its parts are read one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_gate(self) -> GatePart | None:
        """Return the gate part, or None if missing."""
        return self._read(0, GatePart)

    def read_files(self) -> FilesPart | None:
        """Return the files part, or None if missing."""
        return self._read(1, FilesPart)

    def read_kept(self) -> KeptPart | None:
        """Return the kept part, or None if missing."""
        return self._read(2, KeptPart)

    def write(self, gate: GatePart, files: FilesPart, kept: KeptPart) -> None:
        """Replace the file, and forget the oldest ones."""
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
        with contextlib.suppress(OSError):  # others may do the same at the same time
            found = sorted(self.path.parent.glob("*.index"), key=lambda path: path.stat().st_mtime_ns)
            for path in found[:-ENTRIES_MAX]:
                path.unlink(missing_ok=True)

    def renew(self, gate: GatePart | None = None, files: FilesPart | None = None) -> None:
        """Replace one part by what was seen since; what cannot be written is let be.

        It stays with the parts that it goes with. When another process has remembered the environment again, what was
        seen here is no longer wanted. (Should that happen just before the rename, the old parts stand there again:
        true for what it was captured as, so the next look finds the change again.)
        """
        old_gate, old_files, kept = self.read_gate(), self.read_files(), self.read_kept()
        if old_gate is None or old_files is None or kept is None:
            return
        gate, files = gate or old_gate, files or old_files
        if len({part.generation for part in (gate, files, kept, old_gate, old_files)}) > 1:
            return
        with contextlib.suppress(OSError):  # a full disk costs the next call some milliseconds
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
    """Return files as they are kept: path, stat (None: not there), SHA-256 (b"" in all of them, or in none)."""
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
    """Return an mtime or ctime that will tell a later change, else `UNKNOWN`.

    `seen_ns` is when the look began that saw it.
    """
    tick_ns = _COARSE_TICK_NS if mtime_ns % 1_000_000_000 == 0 else _TICK_NS
    return UNKNOWN if mtime_ns > seen_ns - tick_ns else mtime_ns


def pack_directories(directories: Sequence[tuple[int, Directory]], seen_ns: int) -> tuple[str, bytes, bytes, bytes]:
    """Return directories as they are kept: names, areas, mtimes, marks."""
    names = "\0".join(directory.path for _, directory in directories)
    areas = array("H", (area for area, _ in directories)).tobytes()
    mtimes = array("q", (known_mtime(directory.mtime_ns, seen_ns) for _, directory in directories)).tobytes()
    return names, areas, mtimes, b"".join(directory.mark for _, directory in directories)


Place = tuple[str, str, str]
"""Where a unit is, whatever its version: directory of its root, kind, name."""


class IndexedUnit(msgspec.Struct, frozen=True):
    """A unit that was made: where, as what, of which files by path of the row, with which rows, of what."""

    spot: ImportRoot
    member: SnapshotMember
    files: Mapping[str, ListedFile]
    rows: tuple[FileRow, ...]
    distribution: Distribution | None = None


class KnownFiles(msgspec.Struct, frozen=True):
    """What was read before."""

    # by path of the file: size, mtime (or `UNKNOWN`), inode, ctime (or `UNKNOWN`), and its SHA-256
    digests: dict[str, tuple[int, int, int, int, bytes]] = {}
    # by path of a RECORD, or another small file: size, mtime (or `UNKNOWN`), inode
    records: dict[str, tuple[int, int, int]] = {}
    addresses: dict[Place, str] = {}  # of the units, by place

    def find(self, file: ListedFile) -> Digest | None:
        """Return the digest of a file that is the one that was read, by its stat."""
        kept = self.digests.get(file.file)
        if kept is None or kept[:4] != (file.size, file.mtime_ns, file.inode, file.ctime_ns):
            return None
        return Digest(kept[4], file.size)

    def is_touched(self, file: ListedFile, record: ListedFile) -> bool:
        """Return whether a file was touched since it was read, without an installer that wrote RECORD again.

        Then RECORD is not believed, however well size and mtime go with it.
        """
        size, mtime_ns, inode = self.records.get(record.file, (-1, 0, 0))
        is_old = (size, inode) == (record.size, record.inode) and mtime_ns in (UNKNOWN, record.mtime_ns)
        return is_old and file.file in self.digests


def read_memory(index: IndexFile) -> IndexParts | None:
    """Return what is kept of an environment."""
    gate, files, kept = index.read_gate(), index.read_files(), index.read_kept()
    if gate is None or files is None or kept is None:
        return None
    return IndexParts(gate, files, kept) if gate.generation == files.generation == kept.generation else None


def known_of(memory: IndexParts | None, found: Survey) -> KnownFiles:
    """Return what was read before of the files that exist now; nothing without a memory."""
    if memory is None:
        return KnownFiles()
    gate, files = memory.gate, memory.files
    wanted = {file.file for part in found.parts for file in part.files.values()}
    digests: dict[str, tuple[int, int, int, int, bytes]] = {}
    for stats in (gate.code, files.files):
        for number, (name, *numbers) in enumerate(zip(stats.names(), *stats.columns(), strict=True)):
            if name in wanted and stats.kinds[number] in "fx":
                size, mtime_ns, inode, ctime_ns = numbers
                digests[name] = (size, mtime_ns, inode, ctime_ns, stats.digests[32 * number : 32 * number + 32])
    small = zip(gate.small.names(), *gate.small.columns(), strict=True)
    records = {name: (size, mtime_ns, inode) for name, size, mtime_ns, inode, _ in small}
    addresses: dict[Place, str] = {(owner.site, owner.kind, owner.name): owner.address for owner in files.owners}
    return KnownFiles(digests, records, addresses)


def make_parts(
    key: bytes,
    snapshot: Snapshot,
    found: Survey,
    made: Sequence[IndexedUnit],
    digests: Mapping[str, bytes],
    seen_ns: int,
) -> IndexParts:
    """Return the parts of an index.

    `digests` are SHA-256 of each file, by its path, as captured; `seen_ns` is when the survey began.
    """
    made = [*made, *_made_before(found)]
    areas = [(area, listing) for part in found.parts for area, listing in part.areas]
    directories = [
        (number, directory) for number, (_, listing) in enumerate(areas) for directory in listing.directories.values()
    ]
    names, areas_of, mtimes, marks = pack_directories(directories, seen_ns)
    code = [file for one in made if one.member.kind == "code" for file in _digested(one, digests)]
    generation = os.urandom(16)
    gate = GatePart(
        generation=generation,
        key=key,
        snapshot=snapshot,
        areas=tuple(area for area, _ in areas),
        directories=names,
        areas_of=areas_of,
        mtimes=mtimes,
        marks=marks,
        small=_small(_watched(found, snapshot), seen_ns),
        code=pack_stats(code, seen_ns),
        absent="\0".join(found.absent),
    )
    files, owners_of, owners = _owned_files(snapshot, made, digests)
    parts = FilesPart(generation, pack_stats(files, seen_ns), owners_of, owners)
    return IndexParts(gate, parts, _kept_part(found, gate, made, seen_ns))


def _made_before(found: Survey) -> list[IndexedUnit]:
    """Return the units that were reused as if they had been made."""
    made = []
    for part in found.parts:
        for member in part.reused.members if part.reused is not None else ():
            assert part.reused is not None
            unit = part.reused.unit(member.address)
            made.append(
                IndexedUnit(part.spot, member, {row.path: file for row, file in unit}, tuple(row for row, _ in unit))
            )
    return made


def _kept_part(found: Survey, gate: GatePart, made: Sequence[IndexedUnit], seen_ns: int) -> KeptPart:
    part = found.parts[0]
    if not part.spot.is_venv:
        return KeptPart(generation=gate.generation)
    mine = [(number, one) for number, one in enumerate(made) if one.spot == part.spot]
    units = [(number, one.distribution, one.rows) for number, one in mine if one.distribution is not None]
    kept = reusable(part, units)
    owner_of: dict[str, int] = {}
    for number, distribution, _ in units:
        if any(one.owner == number for one in kept):
            paths = (row_path(claim.path, part.spot.site, part.spot.prefix) for claim in distribution.claims)
            owner_of.update((path, number) for path in paths if path is not None)
    in_units = {path for _, one in mine for path in one.files}
    others = [(file, owner_of.get(path, NO_OWNER)) for path, file in part.files.items() if path not in in_units]
    if part.reused is not None:
        for number, one in mine:
            before = part.reused.distributions.get(one.member.address)
            if one.distribution is None and before is not None:
                kept.append(msgspec.structs.replace(before, owner=number))
                others += [(file, number) for file in part.reused.others[one.member.address]]
    return KeptPart(
        generation=gate.generation,
        spot=part.spot,
        inodes=directory_inodes(gate.directory_names()),
        others=pack_stats(((file.file, file, b"") for file, _ in others), seen_ns),
        others_of=array("I", (owner for _, owner in others)).tobytes(),
        distributions=tuple(kept),
    )


def _owned_files(
    snapshot: Snapshot, made: Sequence[IndexedUnit], digests: Mapping[str, bytes]
) -> tuple[list[tuple[str, ListedFile | None, bytes]], bytes, tuple[UnitOwner, ...]]:
    """Return the files of the libraries with their digests, for each the number of its owner, and the owners."""
    originals = snapshot.facts.originals
    captured = {
        (originals[number], member.kind, member.name, member.version): member.address
        for number, root in enumerate(snapshot.roots)
        for member in root.members
    }
    owners: list[UnitOwner] = []
    owners_of = array("I")
    files: list[tuple[str, ListedFile | None, bytes]] = []
    for one in made:
        member, spot = one.member, one.spot
        address = captured.get((spot.directory, member.kind, member.name, member.version), member.address)
        owner = UnitOwner(spot.directory, spot.prefix, member.kind, member.name, member.version, address)
        if member.kind != "code":
            mine = _digested(one, digests)
            files += mine
            owners_of.extend([len(owners)] * len(mine))
        owners.append(owner)
    return files, owners_of.tobytes(), tuple(owners)


def _digested(one: IndexedUnit, digests: Mapping[str, bytes]) -> list[tuple[str, ListedFile | None, bytes]]:
    found: list[tuple[str, ListedFile | None, bytes]] = []
    for row in one.rows:
        file = one.files[row.path]
        if row.has_content:
            found.append((file.file, file, digests.get(file.file, row.sha256)))
        else:
            found.append((file.file, file, hashlib.sha256(os.fsencode(os.readlink(file.file))).digest()))
    return found


def _watched(found: Survey, snapshot: Snapshot) -> dict[str, ListedFile | None]:
    """Return the small files that decide what counts, as they were found; None for those that were not listed.

    Files that were taken out of their units because they name directories are among them: no unit answers for them.
    """
    generated = {
        original: [one.path for one in root.generated]
        for original, root in zip(snapshot.facts.originals, snapshot.roots, strict=True)
        if root.generated
    }
    watched: dict[str, ListedFile | None] = {}
    for part in found.parts:
        paths = [path for path in generated.get(part.spot.directory, ()) if path in part.files]
        watched |= {part.files[path].file: part.files[path] for path in paths}
        watched |= {path: None for path in part.watched if path not in watched}
    return watched


def _small(files: Mapping[str, ListedFile | None], seen_ns: int) -> Stats:
    """Return small files with their digests, those that are not there as such.

    One that is no longer what was found is kept as it was found, with a digest that nothing has: what was captured is
    not what it says now.
    """
    found: list[tuple[str, ListedFile | None, bytes]] = []
    for path, then in files.items():
        file, digest = read_file(path), b"\0" * 32
        if then is not None and then.kind != "l" and then != file:
            file = then
        elif file is not None:
            try:
                digest = digest_files([(path, "site/", file.size)])[0].sha256
            except EnvironmentUnsupported:  # gone meanwhile: it will be seen as changed
                file = None
        found.append((path, file, digest))
    return pack_stats(found, seen_ns)
