"""Converts the units and directories of a scan to index parts, and back.

File digests come from the captured scan, in which the capture has corrected the digests of wrong RECORD files.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu.environment.documents import FileRow, Snapshot, SnapshotMember
from serverless_gpu.environment.scan.digests import Digest, digest_files
from serverless_gpu.environment.scan.directory_listing import ListedFile, read_file
from serverless_gpu.environment.scan.distributions import Distribution, row_path
from serverless_gpu.environment.scan.index import (
    NO_OWNER,
    UNKNOWN,
    FilesPart,
    GatePart,
    IndexFile,
    KeptPart,
    Stats,
    UnitOwner,
    pack_directories,
    pack_stats,
)
from serverless_gpu.environment.scan.roots import ImportRoot, Survey
from serverless_gpu.environment.scan.standard_library_rescan import IndexParts, directory_inodes, reusable
from serverless_gpu.errors import EnvironmentUnsupported

Place = tuple[str, str, str]
"""Identifies a unit across versions: the directory of its root, its kind and its name."""


class IndexedUnit(msgspec.Struct, frozen=True):
    """A composed unit: root, member, files by row path, rows, and distribution."""

    spot: ImportRoot
    member: SnapshotMember
    files: Mapping[str, ListedFile]
    rows: tuple[FileRow, ...]
    distribution: Distribution | None = None


class KnownFiles(msgspec.Struct, frozen=True):
    """File digests, `stat` values and unit addresses from an earlier scan."""

    # Path of a file → size, mtime (or `UNKNOWN`), inode, ctime (or `UNKNOWN`), and SHA-256.
    digests: dict[str, tuple[int, int, int, int, bytes]] = {}
    # Path of a RECORD or another small file → size, mtime (or `UNKNOWN`), inode.
    records: dict[str, tuple[int, int, int]] = {}
    addresses: dict[Place, str] = {}  # Place of a unit → address of the unit.

    def find(self, file: ListedFile) -> Digest | None:
        """Return a file's stored digest if its `stat` values are unchanged, else None."""
        kept = self.digests.get(file.file)
        if kept is None or kept[:4] != (file.size, file.mtime_ns, file.inode, file.ctime_ns):
            return None
        return Digest(kept[4], file.size)

    def is_touched(self, file: ListedFile, record: ListedFile) -> bool:
        """Return True if a file has changed since the last scan but its RECORD has not.

        The scan does not trust RECORD for a changed file, even if the size and mtime match.
        """
        size, mtime_ns, inode = self.records.get(record.file, (-1, 0, 0))
        is_old = (size, inode) == (record.size, record.inode) and mtime_ns in (UNKNOWN, record.mtime_ns)
        return is_old and file.file in self.digests


def read_memory(index: IndexFile) -> IndexParts | None:
    """Return the index parts of an environment, or None if a part is missing or the generations differ."""
    gate, files, kept = index.read_gate(), index.read_files(), index.read_kept()
    if gate is None or files is None or kept is None:
        return None
    return IndexParts(gate, files, kept) if gate.generation == files.generation == kept.generation else None


def known_of(memory: IndexParts | None, found: Survey) -> KnownFiles:
    """Return an earlier scan's data about files that still exist, or empty data without an index."""
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
    """Return the index parts for a captured scan.

    `digests` maps the path of each file to its captured SHA-256. `seen_ns` is the time at which the survey started.
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
    """Convert the reused units of a rescan to composed units."""
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
    """Return the library files with digests, the owner number of each file, and the owners."""
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
    """Return the small files whose content determines the selection of captured files.

    A file that no directory listing contains has the value None.

    The result includes files with local directory paths, which the capture has taken out of their units.
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
    """Return small files with their `stat` values and digests, with zeros for a missing file.

    A file that has changed since the survey keeps its old `stat` values and gets an impossible digest. The impossible
    digest makes the next check read the file.
    """
    found: list[tuple[str, ListedFile | None, bytes]] = []
    for path, then in files.items():
        file, digest = read_file(path), b"\0" * 32
        if then is not None and then.kind != "l" and then != file:
            file = then
        elif file is not None:
            try:
                digest = digest_files([(path, "site/", file.size)])[0].sha256
            # The next check reports a change, because a user or program deleted the file after the survey.
            except EnvironmentUnsupported:
                file = None
        found.append((path, file, digest))
    return pack_stats(found, seen_ns)
