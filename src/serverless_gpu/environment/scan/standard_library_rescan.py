"""Rescans the interpreter's own library, and reuses units that have not changed since the capture.

    every directory's and file's stat ─ the same ────────────────▶ nothing to do
                                      └ another ─ listed again ─▶ paths that are new, missing or changed
    distributions ─ without these paths, and no file claimed by another one ─▶ `ReusedUnits`: the unchanged unit
                  └ all others, and unowned files ─▶ the part: files and distributions as in a full scan

A rescan gives the same result as a full scan. The rescan therefore reuses only simple distributions, which `reusable`
selects. If a rescan finds an irregularity, such as broken links or a vanished directory, a full scan replaces the
rescan.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from serverless_gpu.environment.documents import FileRow, RowKind, SnapshotMember
from serverless_gpu.environment.scan.digests import may_be_script
from serverless_gpu.environment.scan.directory_listing import Directory, DirectoryListing, ListedFile, Listing, look
from serverless_gpu.environment.scan.distributions import Distribution, read_distributions, row_path
from serverless_gpu.environment.scan.index import NO_OWNER, FilesPart, GatePart, KeptPart, Stats
from serverless_gpu.environment.scan.roots import (
    Area,
    ImportRoot,
    KeptDistribution,
    ReusedUnits,
    SurveyedRoot,
    check_names,
    keep_for,
)
from serverless_gpu.environment.scan.units import may_name_directories
from serverless_gpu.errors import EnvironmentUnsupported

_INFO = ".dist-info"


class IndexParts(msgspec.Struct, frozen=True):
    """The three parts of an environment's index file."""

    gate: GatePart
    files: FilesPart
    kept: KeptPart


def look_again(spot: ImportRoot, memory: IndexParts) -> SurveyedRoot | None:
    """Return the current survey of the interpreter's own library, or None if a full scan is needed."""
    areas = memory.gate.areas[:2]
    same = [(area.kind, area.top) for area in areas] == [("site", spot.directory), ("prefix", spot.prefix)]
    if memory.kept.spot != spot or not same:
        return None
    try:
        seen = _Directories(spot, memory)
        return _Choice(spot, memory, seen).part() if seen.compare() else None
    # If an entry disappeared or became unreadable during the rescan, the full scan reports the reason.
    except (OSError, EnvironmentUnsupported):
        return None


def reusable(
    part: SurveyedRoot, units: Sequence[tuple[int, Distribution, Sequence[FileRow]]]
) -> list[KeptDistribution]:
    """Return the distributions whose units a rescan may reuse while their files are unchanged.

    The function excludes distributions with links, with files that other distributions claim, or with files that the
    capture rewrites.
    """
    site, prefix = part.spot.site, part.spot.prefix
    claims = {number: _claimed(distribution, site, prefix) for number, distribution, _ in units}
    for distribution in part.distributions:  # Distributions that have no unit also claim files.
        if not any(distribution is other for _, other, _ in units):
            claims[-1 - len(claims)] = _claimed(distribution, site, prefix)
    often = {path for path, count in Counter(path for paths in claims.values() for path in paths).items() if count > 1}
    links = {path for path, file in part.files.items() if file.kind == "l"}
    found = []
    for number, distribution, rows in units:
        mine = claims[number]
        plain = mine.isdisjoint(often) and mine.isdisjoint(links) and not any(map(may_name_directories, mine))
        if plain and not any(may_be_script(row.path, row.size) for row in rows):
            kept = KeptDistribution(
                owner=number,
                info=distribution.info,
                scripts=tuple(sorted(distribution.scripts)),
                notes=distribution.notes,
                missing=tuple(sorted(path for path in claims[number] if path not in part.files)),
            )
            found.append(kept)
    return found


def own_row_path(spot: ImportRoot, file: str) -> str:
    """Return the row path of a file in a virtual environment."""
    if file.startswith(spot.directory + "/"):
        return f"site/{file[len(spot.directory) + 1 :]}"
    return f"prefix/{file[len(spot.prefix) + 1 :]}"


def _claimed(distribution: Distribution, site: str, prefix: str) -> set[str]:
    paths = (row_path(claim.path, site, prefix) for claim in distribution.claims)
    return {path for path in paths if path is not None and not path.endswith(".pyc")}


class _Directories:
    """Compares directories with the index, and collects changed and missing directories."""

    def __init__(self, spot: ImportRoot, memory: IndexParts) -> None:
        self._spot = spot
        self._gate = memory.gate
        self._files = memory.files
        self._kept = memory.kept
        self.known: dict[str, int] = {}
        self.looked: dict[str, DirectoryListing] = {}
        self.gone: set[str] = set()
        areas_of = memoryview(memory.gate.areas_of).cast("H").tolist()
        self._area_of: dict[str, int] = {}
        for number, name in enumerate(memory.gate.directory_names()):
            if areas_of[number] < 2:
                self.known[name] = number
                self._area_of[name] = areas_of[number]

    def compare(self) -> bool:
        """List changed directories again, and return False if a full scan is needed."""
        again = self._moved()
        mine = [owner.site == self._spot.directory for owner in self._files.owners]
        owners_of = memoryview(self._files.owners_of).cast("I").tolist()
        again.update(_differing(self._files.files, [mine[owner] for owner in owners_of]))
        again.update(_differing(self._kept.others, None))
        children: dict[str, list[str]] = {}
        for name in self.known:
            children.setdefault(os.path.dirname(name), []).append(name)
        for name in sorted(again, key=len):
            if name not in self.known:
                return False
            if not self._is_gone(name) and not self._list(name, children):
                return False
        self.gone = {name for name in self.known if self._is_gone(name)} if self.gone else self.gone
        return True

    def listings(self) -> tuple[tuple[Area, Listing], ...]:
        """Return the current listings of the areas, without files."""
        areas = self._gate.areas[:2]
        listings = [Listing(top=area.top, files={}, directories={}, odd={}) for area in areas]
        mtimes = memoryview(self._gate.mtimes).cast("q").tolist()
        marks = self._gate.marks
        for name, number in self.known.items():
            if name not in self.gone and name not in self.looked:
                directory = Directory(name, mtimes[number], marks[8 * number : 8 * number + 8])
                listing = listings[self._area_of[name]]
                listing.directories[name[len(listing.top) + 1 :]] = directory
        for name, seen in self.looked.items():
            listing = listings[self._area_of[name]]
            listing.directories[name[len(listing.top) + 1 :]] = seen.directory
        return tuple(zip(areas, listings, strict=True))

    def _moved(self) -> set[str]:
        """Return the directories whose entries may have changed."""
        mtimes = memoryview(self._gate.mtimes).cast("q").tolist()
        inodes = memoryview(self._kept.inodes).cast("q").tolist()
        again = set()
        for name, number in self.known.items():
            try:
                found = os.lstat(name)
            except OSError:
                again.add(os.path.dirname(name))
                continue
            if found.st_mtime_ns != mtimes[number] or found.st_ino != inodes[number]:
                again.add(name)
        return again

    def _list(self, name: str, children: dict[str, list[str]]) -> bool:
        area = self._area_of[name]
        where = self._gate.areas[area]
        waiting = [name]
        while waiting:
            at = waiting.pop()
            seen = self.looked[at] = look(at, where.top, keep_for(where))
            if seen.odd:
                return False
            below = {f"{at}/{child}" for child in seen.directories}
            self.gone.update(child for child in children.get(at, ()) if child not in below)
            for child in below:
                if child not in self._area_of:
                    self._area_of[child] = area
                    waiting.append(child)
        return True

    def _is_gone(self, name: str) -> bool:
        while len(name) > 1 and name in self.known:
            if name in self.gone:
                return True
            name = os.path.dirname(name)
        return False


class _Choice:
    """Decides which units the rescan reuses and which units need a full scan."""

    def __init__(self, spot: ImportRoot, memory: IndexParts, seen: _Directories) -> None:
        self._spot = spot
        self._memory = memory
        self._seen = seen

    def part(self) -> SurveyedRoot:
        """Return the current survey of the root."""
        spot, memory = self._spot, self._memory
        mine = [owner.site == spot.directory for owner in memory.files.owners]
        kept = [
            *(one for one in _kept_files(memory.files.files, memory.files.owners_of) if mine[one[1]]),
            *_kept_files(memory.kept.others, memory.kept.others_of),
        ]
        void = self._seen.looked.keys() | self._seen.gone
        fresh = {file.file: file for seen in self._seen.looked.values() for file in seen.files.values()}
        changed = self._changed(kept, void, fresh)
        reused = {one.owner: one for one in memory.kept.distributions}
        self._drop_changed(reused, kept, changed)
        owner_of = {file.file: owner for file, owner in kept}
        while True:
            files = {file.file: file for file, owner in kept if owner not in reused and _above(file.file) not in void}
            files.update((path, file) for path, file in fresh.items() if owner_of.get(path, NO_OWNER) not in reused)
            by_row = {own_row_path(spot, path): file for path, file in files.items()}
            distributions = self._read(by_row, {one.info for one in reused.values()})
            claimed = (path for one in distributions for path in _claimed(one, spot.site, spot.prefix))
            split = (path.partition("/") for path in claimed)
            files_claimed = (f"{spot.directory if area == 'site' else spot.prefix}/{below}" for area, _, below in split)
            hit = {owner_of.get(path, NO_OWNER) for path in files_claimed} & reused.keys()
            if not hit:
                break
            for owner in hit:  # A distribution that needs a full scan claims files of the reused unit.
                del reused[owner]
        check_names(spot, by_row)
        records = [file.file for path, file in by_row.items() if path.endswith(f"{_INFO}/RECORD")]
        records += [f"{spot.directory}/{one.info}/RECORD" for one in reused.values()]
        return SurveyedRoot(
            spot=spot,
            files=by_row,
            areas=self._seen.listings(),
            distributions=tuple(distributions),
            watched=(*records, os.path.join(spot.prefix, "pyvenv.cfg")),
            reused=self._reused(reused, kept),
        )

    def _changed(
        self, kept: Sequence[tuple[ListedFile, int]], void: set[str], fresh: dict[str, ListedFile]
    ) -> set[str]:
        """Return the paths of new, missing or changed files."""
        before = {file.file: file for file, _ in kept if _above(file.file) in void}
        return {
            path
            for path in before.keys() | fresh.keys()
            if path not in before or path not in fresh or fresh[path][1:6] != before[path][1:6]
        }

    def _drop_changed(
        self, reused: dict[int, KeptDistribution], kept: Sequence[tuple[ListedFile, int]], changed: set[str]
    ) -> None:
        top = self._spot.directory + "/"
        rows = {own_row_path(self._spot, path) for path in changed}
        infos = {path[len(top) :].partition("/")[0] for path in changed if path.startswith(top)}
        owners = {owner for file, owner in kept if file.file in changed}
        for owner, one in list(reused.items()):
            if owner in owners or one.info in infos or not rows.isdisjoint(one.missing):
                del reused[owner]

    def _read(self, by_row: dict[str, ListedFile], reused: set[str]) -> list[Distribution]:
        top = self._spot.directory
        infos = [
            name[len(top) + 1 :]
            for name in (*self._seen.known, *self._seen.looked)
            if name.endswith(_INFO) and name not in self._seen.gone and os.path.dirname(name) == top
        ]
        files = {path[5:]: file for path, file in by_row.items() if path.startswith("site/") and _INFO in path}
        directories = {info: Directory(f"{top}/{info}", 0, b"") for info in infos if info not in reused}
        return read_distributions(Listing(top=top, files=files, directories=directories, odd={}))

    def _reused(self, reused: dict[int, KeptDistribution], kept: Sequence[tuple[ListedFile, int]]) -> ReusedUnits:
        memory = self._memory
        members = {
            (member.kind, member.name, member.version, member.address): member
            for member in memory.gate.snapshot.roots[0].members
        }
        found: dict[int, SnapshotMember] = {}
        for owner in reused:
            one = memory.files.owners[owner]
            found[owner] = members[one.kind, one.name, one.version, one.address]
        others: dict[int, list[ListedFile]] = {owner: [] for owner in reused}
        for file, owner in _kept_files(memory.kept.others, memory.kept.others_of):
            if owner in others:
                others[owner].append(file)
        units = _Units(self._spot, memory.files, {member.address: owner for owner, member in found.items()})
        return ReusedUnits(
            members=tuple(found.values()),
            scripts=frozenset(name for one in reused.values() for name in one.scripts),
            notes={path: text for one in reused.values() for path, text in one.notes.items()},
            files=frozenset(file.file for file, owner in kept if owner in reused),
            distributions={found[owner].address: one for owner, one in reused.items()},
            others={found[owner].address: tuple(files) for owner, files in others.items()},
            unit=units.unit,
        )


class _Units:
    """Computes the rows of reused units on demand."""

    def __init__(self, spot: ImportRoot, files: FilesPart, owners: dict[str, int]) -> None:
        self._spot = spot
        self._files = files
        self._owners = owners
        self._found: dict[int, list[tuple[FileRow, ListedFile]]] = {}

    def unit(self, address: str) -> list[tuple[FileRow, ListedFile]]:
        """Return the rows of a unit with their files, sorted by path."""
        if not self._found:
            digests, wanted = self._files.files.digests, set(self._owners.values())
            for number, (file, owner) in enumerate(_kept_files(self._files.files, self._files.owners_of)):
                if owner in wanted:
                    kind: RowKind = "x" if file.kind == "x" else "f"
                    path, digest = own_row_path(self._spot, file.file), digests[32 * number : 32 * number + 32]
                    self._found.setdefault(owner, []).append((FileRow(path, kind, file.size, digest), file))
        return sorted(self._found[self._owners[address]], key=lambda one: one[0].path)


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _kept_files(stats: Stats, owners_of: bytes) -> Iterator[tuple[ListedFile, int]]:
    names, owners = stats.names(), memoryview(owners_of).cast("I").tolist()
    for name, kind, *numbers, owner in zip(names, stats.kinds, *stats.columns(), owners, strict=True):
        size, mtime_ns, inode, ctime_ns = numbers
        yield ListedFile(name, kind, size, mtime_ns, inode, ctime_ns), owner


def _differing(stats: Stats, mine: Sequence[bool] | None) -> set[str]:
    """Return the directories of files with changed `stat` values, and the directories of all links."""
    found = set()
    look_at, executable, is_link = os.lstat, stat.S_IXUSR, stat.S_ISLNK
    for number, (name, kind, size, mtime_ns, inode, ctime_ns) in enumerate(
        zip(stats.names(), stats.kinds, *stats.columns(), strict=True)
    ):
        if mine is not None and not mine[number]:
            continue
        try:
            seen = look_at(name)
        except OSError:
            found.add(_above(name))
            continue
        if (
            seen.st_mtime_ns != mtime_ns
            or seen.st_ctime_ns != ctime_ns
            or seen.st_size != size
            or seen.st_ino != inode
            or (kind == "x") != bool(seen.st_mode & executable)
            or is_link(seen.st_mode)
        ):
            found.add(_above(name))
    return found


def directory_inodes(names: Iterable[str]) -> bytes:
    """Return the inodes of directories in the index's form, with 0 for a missing directory."""
    inodes = array("q")
    for name in names:
        try:
            inodes.append(os.lstat(name).st_ino)
        except OSError:
            inodes.append(0)
    return inodes.tobytes()
