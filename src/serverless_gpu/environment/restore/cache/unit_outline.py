"""What assembling an environment has to know of a unit, worked out once when it is unpacked; no row is read again.

RECORD is made of rows, so that `importlib.metadata` and pip see the files; its lines for scripts differ on each tree
and are added when a tree is assembled.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable

import msgspec

from serverless_gpu.environment.documents import FileRow, Unit
from serverless_gpu.environment.restore.scripts import entry_points, is_generic

_DIST_INFO = re.compile(r"site/([^/]+\.dist-info)/METADATA")
_SCRIPT_BYTES_MAX = 1_000_000

Read = Callable[[str], bytes]


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """A unit in short."""

    size: int  # content bytes
    files: int
    areas: tuple[str, ...]
    dist_info: str = ""  # name of its metadata directory, or ""
    record: str = ""
    points: dict[str, str] = {}
    generic: dict[str, bytes] = {}


def outline(unit: Unit, read: Read) -> Outline:
    """Return the outline of a unit.

    Args:
        unit: its rows.
        read: returns the content of a row, by its path.
    """
    areas = dict.fromkeys(row.path.partition("/")[0] for row in unit.rows)
    dist_info = next((match[1] for row in unit.rows if (match := _DIST_INFO.fullmatch(row.path))), "")
    generic = {row.path: content for row in unit.rows if _may_be_script(row) and is_generic(content := read(row.path))}
    record, points = "", {}
    if dist_info:
        record = "".join(
            record_line(row, dist_info) for row in unit.rows if row.has_content and row.path not in generic
        )
        path = f"site/{dist_info}/entry_points.txt"
        if any(row.path == path and row.size <= _SCRIPT_BYTES_MAX for row in unit.rows):
            points = entry_points(read(path).decode(errors="replace"))
    return Outline(
        size=sum(row.size for row in unit.rows),
        files=sum(row.has_content for row in unit.rows),
        areas=tuple(sorted(areas)),
        dist_info=dist_info,
        record=record,
        points=points,
        generic=generic,
    )


def record_line(row: FileRow, dist_info: str) -> str:
    """Return the line of RECORD for one file; paths are relative to the site area."""
    area, _, path = row.path.partition("/")
    if path == f"{dist_info}/RECORD" and area == "site":
        return ""
    digest = base64.urlsafe_b64encode(row.sha256).rstrip(b"=").decode()
    return f"{_quoted(path if area == 'site' else f'../../../{path}')},sha256={digest},{row.size}\n"


def record_row(path: str, content: bytes) -> FileRow:
    """Return the row a generated file would have."""
    return FileRow(path=path, size=len(content), sha256=hashlib.sha256(content).digest())


def _quoted(path: str) -> str:
    return '"' + path.replace('"', '""') + '"' if set(path) & set(',"\r\n') else path


def _may_be_script(row: FileRow) -> bool:
    return row.path.startswith("prefix/bin/") and row.has_content and 8 <= row.size <= _SCRIPT_BYTES_MAX
