"""What is different from one snapshot to another, down to the files, as far as both versions of a unit are at hand.

    compare (scan/changes.py) ─ units that differ ─ their rows: from the scan, or from the store ─▶ with_files

A file of a distribution that is what its RECORD says now was put back, not edited.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from serverless_gpu.environment.documents import FileRow, Snapshot, SnapshotMember
from serverless_gpu.environment.scan.canonical import parse_record
from serverless_gpu.environment.scan.changes import Change, compare, with_files
from serverless_gpu.environment.scan.distributions import read_text
from serverless_gpu.environment.scan.scan import LocalUnit
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentProblem


def differences(
    old: Snapshot, new: Snapshot, sources: Mapping[str, LocalUnit], blobs: StoreBlobs
) -> tuple[Change, ...]:
    """Return what differs.

    Args:
        old: what it was.
        new: what it is.
        sources: units of the new one by address, where it was scanned here.
        blobs: where both were captured; a unit that is not there is named without its files.
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
    except EnvironmentProblem:  # collected, or captured into another store
        return None


def _installed(source: LocalUnit) -> dict[str, bytes]:
    """Return what RECORD of a distribution says of its files, by path of the row; nothing if missing."""
    files = iter(source.files)
    for row in source.rows:
        file = next(files) if row.has_content else ""
        if row.path.endswith(".dist-info/METADATA") and row.path.count("/") == 2:
            try:
                record = read_text(os.path.join(os.path.dirname(file), "RECORD"))
            except EnvironmentProblem:  # gone meanwhile
                return {}
            return {f"site/{claim.path}": claim.sha256 for claim in parse_record(record)}
    return {}
