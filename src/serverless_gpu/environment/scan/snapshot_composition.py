"""Composes a snapshot from scanned roots: rows and addresses of units, and members of roots.

    parts ─ drafts ─ generated files taken out ─ links settled ─ digests ─ rows ─ units ─ members ─ roots ─ snapshot

A file's digest comes from an earlier scan (same stat), a trusted RECORD, or the file itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from serverless_gpu.environment.documents import (
    FileRow,
    ProgressPoint,
    Report,
    Root,
    RowKind,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    in_order,
    make_snapshot,
    unit_address,
)
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.digests import Digest, digest_files, may_be_script
from serverless_gpu.environment.scan.directory_listing import ListedFile, is_plain
from serverless_gpu.environment.scan.index_codec import IndexedUnit, KnownFiles
from serverless_gpu.environment.scan.roots import ReusedUnits, Survey, SurveyedRoot
from serverless_gpu.environment.scan.standard_library_rescan import own_row_path
from serverless_gpu.environment.scan.units import (
    DirectoryPlaceholders,
    RootDrafts,
    UnitDraft,
    archive_line,
    draft_units,
    settle_contested,
    settle_links,
    take_generated,
)

_LEFT_OUT_MAX = 1000


class LocalUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit whose files exist on this machine."""

    rows: tuple[FileRow, ...]  # File rows of the unit, sorted by path.
    # Absolute paths of the files with content, in the order of their rows. Code that opens the source files must follow
    # symbolic links.
    files: tuple[str, ...]
    # Row number → text that replaces the file's content (a script whose first line is `#!python`).
    texts: dict[int, bytes] = {}
    previous: str = ""  # Address of the unit's last captured version, or "".


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot with its local units and the file data that the index stores."""

    snapshot: Snapshot
    sources: Mapping[str, LocalUnit]
    made: list[IndexedUnit]


def compose(
    found: Survey, description: Description, known: KnownFiles, captured_ns: int, report: Report
) -> Composition:
    """Compose and return the snapshot of a survey."""
    # A root without files does not become a part. The parts always include the interpreter's own root.
    parts = [part for number, part in enumerate(found.parts) if part.files or number == 0]
    drafts = [draft_units(part) for part in parts]
    directories = DirectoryPlaceholders([part.spot for part in parts])
    generated = [take_generated(one.units, directories) for one in drafts]
    for number, part in enumerate(parts):
        if part.spot.archive and not part.spot.before:
            generated[0] = (*generated[0], archive_line(number, part.spot))
    left_out = [*found.left_out, *(said for one in drafts for unit in one.units for said in settle_links(unit))]
    digests = _digest_all(drafts, known, report)
    composer = _Composer(known)
    roots = []
    for part, drafted, digested, texts in zip(parts, drafts, digests, generated, strict=True):
        settle_contested(drafted.contested, {path: digest.sha256 for path, digest in digested.items()})
        members = [composer.make_member(part, unit, digested) for unit in drafted.units if unit.files]
        members += composer.reuse(part)
        # The snapshot lists units in canonical order, and identical units once.
        listed = in_order({member.address: member for member in members}.values())
        spot = part.spot
        kind = "library" if spot.kind == "archive" else spot.kind
        roots.append(Root(kind=kind, members=listed, generated=texts, before=spot.before, on_path=spot.on_path))
    facts = _make_facts(parts, description, captured_ns, left_out)
    snapshot = make_snapshot(description.interpreter, tuple(roots), facts)
    return Composition(snapshot=snapshot, sources=composer.sources, made=composer.made)


class UnitSources(Mapping[str, LocalUnit]):
    """Local units by unit address. The mapping computes the rows of reused units on demand."""

    def __init__(self) -> None:
        self._known: dict[str, LocalUnit] = {}
        self._reused: dict[str, ReusedUnits] = {}

    def add(self, address: str, source: LocalUnit) -> None:
        """Add the source files of a unit."""
        self._known[address] = source

    def add_reused(self, reused: ReusedUnits) -> None:
        """Add a root's reused units to the sources."""
        for member in reused.members:
            self._reused.setdefault(member.address, reused)

    def __getitem__(self, address: str) -> LocalUnit:
        if address not in self._known:
            unit = self._reused[address].unit(address)
            rows, files = tuple(row for row, _ in unit), tuple(file.file for _, file in unit)
            self._known[address] = LocalUnit(rows=rows, files=files)
        return self._known[address]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._known, *self._reused)))

    def __len__(self) -> int:
        return len(self._known.keys() | self._reused.keys())


class _Composer:
    """Composes units, and collects the units' sources and the data for the index."""

    def __init__(self, known: KnownFiles) -> None:
        self._known = known
        self.sources = UnitSources()
        self.made: list[IndexedUnit] = []

    def make_member(self, part: SurveyedRoot, draft: UnitDraft, digests: Mapping[str, Digest]) -> SnapshotMember:
        """Return the snapshot member for a unit, and store the unit's source."""
        rows: list[FileRow] = []
        files: list[str] = []
        texts: dict[int, bytes] = {}
        size = 0
        for path in sorted(draft.files):
            file = draft.files[path]
            if file.kind == "l":
                rows.append(FileRow(path, "l", target=file.target))
                continue
            digest = digests[path]
            if digest.text is not None:
                texts[len(rows)] = digest.text
            # pip preserves the execute bits of a wheel's scripts. uv sets the execute bit of all scripts.
            is_script = draft.kind == "distribution" and path.startswith("prefix/bin/")
            kind: RowKind = "x" if file.kind == "x" or is_script else "f"
            rows.append(FileRow(path, kind, digest.size, digest.sha256))
            files.append(file.file)
            size += digest.size
        address = unit_address(rows)
        place = (part.spot.directory, draft.kind, draft.name)
        previous = self._known.addresses.get(place, "")
        source = LocalUnit(
            rows=tuple(rows), files=tuple(files), texts=texts, previous="" if previous == address else previous
        )
        self.sources.add(address, source)
        member = SnapshotMember(
            address=address,
            kind=draft.kind,
            name=draft.name,
            version=draft.version,
            size=size,
            files=len(files),
            modules=draft.modules(),
        )
        self.made.append(IndexedUnit(part.spot, member, draft.files, tuple(rows), draft.distribution))
        return member

    def reuse(self, part: SurveyedRoot) -> tuple[SnapshotMember, ...]:
        """Return the unchanged units of a root."""
        if part.reused is None:
            return ()
        self.sources.add_reused(part.reused)
        return part.reused.members


def _digest_all(drafts: Sequence[RootDrafts], known: KnownFiles, report: Report) -> list[dict[str, Digest]]:
    """Return the file digests of each part, by row path."""
    digests: list[dict[str, Digest]] = []
    unread: list[tuple[int, str, ListedFile]] = []
    for number, one in enumerate(drafts):
        mine: dict[str, Digest] = {}
        digests.append(mine)
        for unit in one.units:
            for path, file in unit.files.items():
                if file.kind == "l" or path in mine:
                    continue
                digest = None if may_be_script(path, file.size) else known.find(file)
                claim = unit.believed.get(path)
                if digest is None and claim is not None and not (unit.record and known.is_touched(file, unit.record)):
                    digest = Digest(claim.sha256, claim.size)
                if digest is not None:
                    mine[path] = digest
                else:
                    # The empty digest reserves the path, because another unit may have the same file.
                    mine[path] = Digest(b"", 0)
                    unread.append((number, path, file))
    total = sum(file.size for _, _, file in unread)

    def done(files: int, size: int) -> None:
        report(
            ProgressPoint(
                phase="scan",
                files_done=files,
                files_total=len(unread),
                bytes_done=size,
                bytes_total=total,
                name="reading",
            )
        )

    read = digest_files([(file.file, path, file.size) for _, path, file in unread], done)
    for (number, path, _), digest in zip(unread, read, strict=True):
        digests[number][path] = digest
    return digests


def _make_facts(
    parts: Sequence[SurveyedRoot], description: Description, captured_ns: int, left_out: Sequence[str]
) -> SnapshotOrigin:
    sentences = tuple(dict.fromkeys(sentence for sentence in left_out if is_plain(sentence)))
    if len(sentences) > _LEFT_OUT_MAX:
        more = len(sentences) - _LEFT_OUT_MAX
        sentences = (*sentences[:_LEFT_OUT_MAX], f"{more} more")
    return SnapshotOrigin(
        captured_ns=captured_ns,
        python=os.path.realpath(description.base_executable),
        prefix=description.prefix,
        originals=tuple(part.spot.directory for part in parts),
        notes=tuple(_notes(part) for part in parts),
        loaded=_loaded(parts, description.loaded),
        variables=description.variables,
        left_out=sentences,
    )


def _notes(part: SurveyedRoot) -> dict[str, str]:
    notes = {path: text for distribution in part.distributions for path, text in distribution.notes.items()}
    if part.reused is not None:
        notes.update(part.reused.notes)
    return dict(sorted(notes.items()))


def _loaded(parts: Sequence[SurveyedRoot], loaded: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the rows of the imported Python files of each root."""
    rows = {file.file: (number, path) for number, part in enumerate(parts) for path, file in part.files.items()}
    found: list[list[str]] = [[] for _ in parts]
    reused = [(number, part.spot, part.reused.files) for number, part in enumerate(parts) if part.reused is not None]
    for file in loaded:
        number, path = rows.get(file, (0, ""))
        for index, spot, files in reused:
            if not path and file in files:
                number, path = index, own_row_path(spot, file)
        if path.endswith(".py"):
            found[number].append(path)
    return tuple(tuple(paths) for paths in found)
