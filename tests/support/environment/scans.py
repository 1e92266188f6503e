"""Scans as tests want them: checked by the rules of restores, and read by path."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

from serverless_gpu.environment.documents import FileRow, Snapshot, ignore_progress
from serverless_gpu.environment.scan.index import UNKNOWN, known_mtime
from serverless_gpu.environment.scan.scan import Recogniser, Scan
from serverless_gpu.environment.snapshot_validation import check_rows, check_snapshot
from tests.support.environment.wheels import Venv


def scan(venv: Venv, cwd: Path | None = None, path: str | Path = "") -> Scan:
    found = Recogniser(venv.prefix.parent / "index").scan(venv.describe(cwd, PYTHONPATH=str(path)), ignore_progress)
    check(found)
    return found


def check(found: Scan) -> None:
    """Check that a restore would take it."""
    check_snapshot(found.snapshot)
    for source in found.sources.values():
        check_rows(source.rows)


def rows(found: Scan, number: int, kind: str, name: str = "") -> dict[str, FileRow]:
    (member,) = (one for one in found.snapshot.roots[number].members if (one.kind, one.name) == (kind, name))
    return {row.path: row for row in found.sources[member.address].rows}


def names(snapshot: Snapshot, number: int) -> list[str]:
    return [f"{member.kind} {member.name}".strip() for member in snapshot.roots[number].members]


def write(directory: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        at = directory / name
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
    return directory


def write_record(venv: Venv, change: dict[str, str | None]) -> None:
    """Change lines of the tool's RECORD, by path; None removes one. Its time stays, as an installer's would."""
    record = next(venv.site.glob("tool-*/RECORD"))
    kept = [line for line in record.read_text().splitlines() if line.partition(",")[0] not in change]
    record.write_text("\n".join([*kept, *(line for line in change.values() if line)]) + "\n")


def claim(path: str, content: bytes, size: int | None = None) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(content) if size is None else size}"


def wait_for_ticks() -> None:
    """Wait until a file written now is told apart from all that were written before."""
    newest = time.time_ns()
    deadline = time.monotonic() + 60
    while known_mtime(newest, time.time_ns()) == UNKNOWN:
        assert time.monotonic() < deadline
        time.sleep(0.005)
