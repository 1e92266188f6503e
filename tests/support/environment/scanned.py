"""Directories as scans, for tests of what comes after a scan: every file is hashed, nothing is left out."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from serverless_gpu.environment.documents import (
    FileRow,
    Root,
    SnapshotMember,
    SnapshotOrigin,
    make_snapshot,
    unit_address,
)
from serverless_gpu.environment.scan.scan import Scan
from serverless_gpu.environment.scan.snapshot_composition import LocalUnit
from tests.support.environment.hostile import PYTHON


def source_of(directory: Path, *, area: str = "site", previous: str = "") -> LocalUnit:
    """Return every file, link and empty directory below a directory."""
    found = sorted(_rows(str(directory), area), key=lambda item: item[0].path.encode())
    rows = tuple(row for row, _ in found)
    return LocalUnit(rows=rows, files=tuple(path for row, path in found if row.has_content), previous=previous)


def scan_of(sources: Mapping[str, LocalUnit], *, kind: str = "distribution") -> Scan:
    """Return a scan of one root with these units, by name."""
    members, by_address = [], {}
    for name, source in sources.items():
        address = unit_address(source.rows)
        content = [row.size for row in source.rows if row.has_content]
        members.append(
            SnapshotMember(
                address=address,
                kind=kind,  # type: ignore[arg-type]  # the callers know the three kinds
                name=name,
                version="1.0",
                size=sum(content),
                files=len(content),
            )
        )
        by_address[address] = source
    root = Root(kind="own", members=tuple(sorted(members, key=lambda member: (member.kind, member.name))))
    return Scan(snapshot=make_snapshot(PYTHON, (root,), SnapshotOrigin()), sources=by_address)


def contents(directory: Path) -> dict[str, object]:
    """Return what is below a directory, by path: content and whether it can be run, the target, or nothing."""
    found: dict[str, object] = {}
    for row, path in _rows(str(directory), "x"):
        name = row.path.partition("/")[2]
        if row.kind == "l":
            found[name] = row.target
        elif row.kind == "d":
            found[name] = None
        else:
            found[name] = (row.kind, Path(path).read_bytes())
    return found


def _rows(directory: str, path: str) -> list[tuple[FileRow, str]]:
    rows: list[tuple[FileRow, str]] = []
    for entry in os.scandir(directory):
        below = f"{path}/{entry.name}"
        if entry.is_symlink():
            rows.append((FileRow(path=below, kind="l", target=os.readlink(entry.path)), entry.path))
        elif entry.is_dir():
            inside = _rows(entry.path, below)
            rows += inside or [(FileRow(path=below, kind="d"), entry.path)]
        else:
            data = Path(entry.path).read_bytes()
            kind = "x" if entry.stat().st_mode & stat.S_IXUSR else "f"
            digest = hashlib.sha256(data).digest()
            rows.append((FileRow(path=below, kind=kind, size=len(data), sha256=digest), entry.path))  # type: ignore[arg-type]  # one of the two kinds
    return rows
