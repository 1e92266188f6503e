"""Describes the differences between two snapshots of an environment, down to single files.

    compare ─ units that differ ─ their rows: from the scan, or from the store ─▶ with_files     (`differences`)

    compare        interpreters, distributions by name, other units by root
    compare_rows   files that differ between two versions of a unit
    with_files     changes of a unit's files: added, removed, edited, or back to their installed content

If a distribution's file matches RECORD again, the comparison reports the file as restored, not as edited. All functions
in this module except `differences` are pure.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from serverless_gpu.environment.documents import FileRow, Generated, Snapshot, SnapshotMember
from serverless_gpu.environment.scan.distributions import parse_record, read_text
from serverless_gpu.environment.scan.snapshot_composition import LocalUnit
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentProblem

ChangeKind = Literal["interpreter", "distribution", "unowned", "code", "generated", "root"]
What = Literal["added", "removed", "changed", "edited", "mended"]
_FILES_NAMED_MAX = 3


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between two snapshots."""

    kind: ChangeKind
    name: str  # name of the distribution, code directory or file, or "" for files without a distribution
    what: What
    detail: str = ""  # detail of the change, for example a version or ``2.12.0 → 2.13.0``, or ""
    files: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Describe the change in one line, for example ``torch 2.13.0: torch/nn/init.py edited by hand``."""
        if self.kind == "distribution":
            return self._distribution()
        if self.kind in ("code", "unowned"):
            what = "changed" if self.what == "edited" else self.what
            whole = f"project code {self.name}".rstrip() if self.kind == "code" else "files of no distribution"
            return f"{self._files() or whole} {what}"
        return f"{self.name} {self.what}{f': {self.detail}' if self.detail else ''}"

    def _distribution(self) -> str:
        if self.what == "changed":
            return f"{self.name} {self.detail}"
        title = f"{self.name} {self.detail}".rstrip()
        files = f": {self._files()}" if self.files else ""
        match self.what:
            case "edited":
                return f"{title}{files} edited by hand"
            case "mended":
                return f"{title}{files} {'have' if len(self.files) > 1 else 'has'} the installed content again"
            case _:
                return f"{title}{files} {self.what}{' by hand' if files else ''}"

    def _files(self) -> str:
        more = len(self.files) - _FILES_NAMED_MAX
        return ", ".join(self.files[:_FILES_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """A file that differs between two versions of a unit: its row path and the kind of change."""

    path: str
    what: What


def compare(a: Snapshot, b: Snapshot) -> tuple[Change, ...]:
    """Return the differences between two snapshots: interpreters, distributions, files and project code."""
    if a.address == b.address:
        return ()
    changes = _compare_interpreters(a, b)
    changes += _compare_distributions(_distributions(a), _distributions(b))
    changes += _compare_others(_others(a), _others(b))
    changes += _compare_generated(_generated(a), _generated(b))
    return tuple(changes or [_compare_rest(a, b)])


def _compare_rest(a: Snapshot, b: Snapshot) -> Change:
    """Return the difference between two snapshots that have the same units and generated files."""
    name = "environment"
    if [root.members for root in a.roots] != [root.members for root in b.roots]:
        name, detail = "sys.path", "the same units in another order"
    elif a.version != b.version:
        detail = f"only the address of the snapshot; the new snapshot has format version {b.version}"
    elif (a.facts.originals, a.facts.prefix) != (b.facts.originals, b.facts.prefix):
        detail = "the same units in another directory"
    else:
        detail = "the same units, with another interpreter or other installer metadata"
    return Change(kind="root", name=name, what="changed", detail=detail)


def compare_rows(a: Iterable[FileRow], b: Iterable[FileRow]) -> tuple[FileChange, ...]:
    """Return the files that differ between two versions of a unit, sorted by path."""
    before, after = {row.path: row for row in a}, {row.path: row for row in b}
    changes = [FileChange(path=path, what="removed") for path in before.keys() - after.keys()]
    changes += [FileChange(path=path, what="added") for path in after.keys() - before.keys()]
    changes += [
        FileChange(path=path, what="changed") for path in before.keys() & after.keys() if before[path] != after[path]
    ]
    return tuple(sorted(changes, key=lambda change: change.path))


def with_files(
    change: Change, before: Iterable[FileRow], after: Iterable[FileRow], installed: Mapping[str, bytes]
) -> tuple[Change, ...]:
    """Return a changed unit's file changes, grouped by kind of change.

    `installed` maps row paths to the SHA-256 in the unit's RECORD. `installed` is empty if the unit has no known
    RECORD.
    """
    after = tuple(after)
    now = {row.path: row.sha256 for row in after}
    found: dict[What, list[str]] = {}
    for file in compare_rows(before, after):
        what: What = "edited" if file.what == "changed" else file.what
        if file.what != "removed" and now[file.path] and installed.get(file.path) == now[file.path]:
            what = "mended"
        found.setdefault(what, []).append(file.path.partition("/")[2])
    order: tuple[What, ...] = ("edited", "added", "removed", "mended")
    said = (msgspec.structs.replace(change, what=what, files=tuple(found[what])) for what in order if what in found)
    return tuple(said) or (change,)


def _compare_interpreters(a: Snapshot, b: Snapshot) -> list[Change]:
    changes = []
    for field in ("implementation", "minor", "abi", "platform"):
        before, after = getattr(a.interpreter, field), getattr(b.interpreter, field)
        if before != after:
            name = {"minor": "Python", "abi": "ABI"}.get(field, field)
            changes.append(Change(kind="interpreter", name=name, what="changed", detail=f"{before} → {after}"))
    return changes


def _compare_distributions(a: dict[str, list[SnapshotMember]], b: dict[str, list[SnapshotMember]]) -> list[Change]:
    changes = []
    for name in sorted(a.keys() | b.keys()):
        before, after = a.get(name, []), b.get(name, [])
        if sorted(member.address for member in before) == sorted(member.address for member in after):
            continue
        old, new = (", ".join(member.version for member in members) for members in (before, after))
        if not before or not after:
            what: What = "added" if after else "removed"
            changes.append(Change(kind="distribution", name=name, what=what, detail=new or old))
        elif old != new:
            changes.append(Change(kind="distribution", name=name, what="changed", detail=f"{old} → {new}"))
        else:
            changes.append(Change(kind="distribution", name=name, what="edited", detail=new))
    return changes


def _compare_others(
    a: dict[tuple[ChangeKind, str], SnapshotMember], b: dict[tuple[ChangeKind, str], SnapshotMember]
) -> list[Change]:
    changes = []
    for kind, name in sorted(a.keys() | b.keys()):
        before, after = a.get((kind, name)), b.get((kind, name))
        if before is None or after is None:
            changes.append(Change(kind=kind, name=name, what="removed" if after is None else "added"))
        elif before.address != after.address:
            changes.append(Change(kind=kind, name=name, what="edited"))
    return changes


def _compare_generated(a: dict[str, Generated], b: dict[str, Generated]) -> list[Change]:
    changes = []
    for path in sorted(a.keys() | b.keys()):
        if a.get(path) != b.get(path):
            what: What = "added" if path not in a else "removed" if path not in b else "changed"
            changes.append(Change(kind="generated", name=path, what=what))
    return changes


def _distributions(snapshot: Snapshot) -> dict[str, list[SnapshotMember]]:
    found: dict[str, list[SnapshotMember]] = {}
    for root in snapshot.roots:
        for member in root.members:
            if member.kind == "distribution":
                found.setdefault(member.name, []).append(member)
    return found


def _others(snapshot: Snapshot) -> dict[tuple[ChangeKind, str], SnapshotMember]:
    """Return the units that are not distributions, and number units with the same name."""
    found: dict[tuple[ChangeKind, str], SnapshotMember] = {}
    for root in snapshot.roots:
        for member in root.members:
            if member.kind != "distribution":
                name, again = member.name, 1
                while (member.kind, name) in found:
                    again += 1
                    name = f"{member.name} ({again})"
                found[member.kind, name] = member
    return found


def _generated(snapshot: Snapshot) -> dict[str, Generated]:
    found: dict[str, Generated] = {}
    for root in snapshot.roots:
        for file in root.generated:
            name = file.path.partition("/")[2]
            found[name if root.kind == "own" else f"{name} ({root.kind})"] = file
    return found


def differences(
    old: Snapshot, new: Snapshot, sources: Mapping[str, LocalUnit], blobs: StoreBlobs
) -> tuple[Change, ...]:
    """Return the differences between two snapshots.

    `sources` maps addresses to the new snapshot's units that were scanned on this machine. If the store lacks a unit,
    the unit's change names no files.
    """
    found: list[Change] = []
    for change in compare(old, new):
        found += _of_files(change, old, new, sources, blobs)
    return tuple(found)


def _of_files(
    change: Change, old: Snapshot, new: Snapshot, sources: Mapping[str, LocalUnit], blobs: StoreBlobs
) -> tuple[Change, ...]:
    before, after = _members(old, change), _members(new, change)
    if change.what != "edited" or len(before) != 1 or len(after) != 1:
        return (change,)
    rows = [_rows(member.address, sources, blobs) for member in (*before, *after)]
    if rows[0] is None or rows[1] is None:
        return (change,)
    source = sources.get(after[0].address) if change.kind == "distribution" else None
    return with_files(change, rows[0], rows[1], {} if source is None else _installed(source))


def _members(snapshot: Snapshot, change: Change) -> list[SnapshotMember]:
    members = (member for root in snapshot.roots for member in root.members)
    return [member for member in members if (member.kind, member.name) == (change.kind, change.name)]


def _rows(address: str, sources: Mapping[str, LocalUnit], blobs: StoreBlobs) -> tuple[FileRow, ...] | None:
    if address in sources:
        return sources[address].rows
    try:
        return blobs.read_unit(address).rows
    except EnvironmentProblem:  # Garbage collection has removed the unit, or only another store contains the unit.
        return None


def _installed(source: LocalUnit) -> dict[str, bytes]:
    """Return the SHA-256 values in a distribution's RECORD by row path, or {} without a RECORD."""
    files = iter(source.files)
    for row in source.rows:
        file = next(files) if row.has_content else ""
        if row.path.endswith(".dist-info/METADATA") and row.path.count("/") == 2:
            try:
                record = read_text(os.path.join(os.path.dirname(file), "RECORD"))
            except EnvironmentProblem:  # A user or program deleted the file after the scan.
                return {}
            return {f"site/{claim.path}": claim.sha256 for claim in parse_record(record)}
    return {}
