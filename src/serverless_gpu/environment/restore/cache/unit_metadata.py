"""Generates unit metadata: outlines for assembling trees, scripts in `bin`, and shared metadata files.

    unpacked ─▶ outline: RECORD from rows, entry points, scripts of any Python   assembling reads no rows
    assembled ─▶ units/<aa>/<address>/site/<name>.dist-info/{RECORD,INSTALLER}   as the first environment needed them
                 units/<aa>/<address>/added                                      path → digest of each added file
                 layers/<7 characters> → ../units/<aa>/<address>/<area>          the name of a mount's layer

    [console_scripts] in entry_points.txt → bin/<name>, the text that pip writes
    #!python in a script of a wheel       → #!<interpreter of this tree>

The outline contains a RECORD generated from the unit's rows, which `importlib.metadata` and pip read. The restore adds
the RECORD lines for scripts when it assembles a tree, because these lines differ in each tree. Creating files is the
largest cost of preparing mounts, especially on a disk with many recent deletions. Metadata stored in units reduces the
generated files of an environment with 200 distributions from a thousand to a hundred. If an environment needs different
content, the environment's generated file hides the unit's file.

The kernel reads 127 bytes of a script's first line and splits the line at spaces. A script with a longer interpreter
path starts as a /bin/sh script, whose shell lines Python parses as a string literal. Scripts that pip installs use the
same technique.

Failure cases: If the disk is full or another process holds a unit's lock, the environment's directory contains the
generated files. If two addresses start with the same characters, the second layer name uses later characters of the
address. The module skips entry points with invalid text or invalid file names. The module never writes to the
interpreter's directory.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import hashlib
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from serverless_gpu.environment.documents import FileRow, Snapshot, Unit
from serverless_gpu.environment.restore.cache.cache_directory import (
    CachePaths,
    make_public,
    read_document,
    try_lock,
    write_document,
)
from serverless_gpu.environment.restore.cache.unpack import MTIME_S

GROUPS = ("console_scripts", "gui_scripts")
_SHEBANG_BYTES_MAX = 127
_NAME = re.compile(r"[^\s=/\[\]\x00-\x1f\x7f][^=/\[\]\x00-\x1f\x7f]*")
_REFERENCE = re.compile(r"(?P<module>\w+(\.\w+)*)\s*:\s*(?P<function>\w+(\.\w+)*)\s*(\[.*\])?\s*")
_INTERPRETER = re.compile(r"(python|pythonw|pypy)[0-9.]*", re.IGNORECASE)
_GENERIC = re.compile(rb"#!python(w?)[ \t]*\r?(\n|$)")
_TEMPLATE = """\
# -*- coding: utf-8 -*-
import re
import sys
from {module} import {first}
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit({function}())
"""
_DIST_INFO = re.compile(r"site/([^/]+\.dist-info)/METADATA")
_SCRIPT_BYTES_MAX = 1_000_000
Read = Callable[[str], bytes]
ADDED_NAMES = ("RECORD", "INSTALLER")
_NAME_LENGTH = 6
_MTIME = (MTIME_S * 10**9, MTIME_S * 10**9)
Files = dict[str, bytes]
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UnitOutline(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a unit for assembling trees."""

    size: int  # Content size of the unit in bytes.
    files: int
    areas: tuple[str, ...]
    dist_info: str = ""  # Name of the unit's `.dist-info` directory, or "".
    record: str = ""
    points: dict[str, str] = {}
    generic: dict[str, bytes] = {}


def outline(unit: Unit, read: Read) -> UnitOutline:
    """Return the outline of a unit."""
    areas = dict.fromkeys(row.path.partition("/")[0] for row in unit.rows)
    dist_info = next((match[1] for row in unit.rows if (match := _DIST_INFO.fullmatch(row.path))), "")
    scripts = (
        row.path
        for row in unit.rows
        if row.path.startswith("prefix/bin/") and row.has_content and 8 <= row.size <= _SCRIPT_BYTES_MAX
    )
    generic = {path: content for path in scripts if is_generic(content := read(path))}
    record, points = "", {}
    if dist_info:
        record = "".join(
            record_line(row, dist_info) for row in unit.rows if row.has_content and row.path not in generic
        )
        path = f"site/{dist_info}/entry_points.txt"
        if any(row.path == path and row.size <= _SCRIPT_BYTES_MAX for row in unit.rows):
            points = entry_points(read(path).decode(errors="replace"))
    return UnitOutline(
        size=sum(row.size for row in unit.rows),
        files=sum(row.has_content for row in unit.rows),
        areas=tuple(sorted(areas)),
        dist_info=dist_info,
        record=record,
        points=points,
        generic=generic,
    )


def record_line(row: FileRow, dist_info: str) -> str:
    """Return the RECORD line of a file, with a path relative to the site area."""
    area, _, path = row.path.partition("/")
    if path == f"{dist_info}/RECORD" and area == "site":
        return ""
    digest = base64.urlsafe_b64encode(row.sha256).rstrip(b"=").decode()
    path = path if area == "site" else f"../../../{path}"
    if set(path) & set(',"\r\n'):
        path = '"' + path.replace('"', '""') + '"'
    return f"{path},sha256={digest},{row.size}\n"


def record_row(path: str, content: bytes) -> FileRow:
    """Return the row of a generated file."""
    return FileRow(path=path, size=len(content), sha256=hashlib.sha256(content).digest())


Outlines = Mapping[str, UnitOutline]


class SharedMetadata:
    """Adds generated metadata to cached units, for all environments that contain the units."""

    def __init__(self, places: CachePaths) -> None:
        self._places = places

    def without_added(self, number: int, snapshot: Snapshot, wanted: dict[str, bytes], outlines: Outlines) -> Files:
        """Return the generated files of a root's site area, except files that the root's units contain."""
        files = dict(wanted)
        for address, _ in _notes_directories(number, snapshot, outlines):
            added = read_document(self._places.unit(address) / "added", dict[str, bytes]) or {}
            for path, digest in added.items():
                content = files.get(path)
                if content is None:
                    # An empty file hides a file that another environment has added to the unit.
                    files[path] = b""
                elif digest == _digest(content):
                    del files[path]
        return files

    def add(self, number: int, snapshot: Snapshot, wanted: Mapping[str, bytes], outlines: Outlines) -> None:
        """Add metadata to the units without metadata."""
        for address, notes in _notes_directories(number, snapshot, outlines):
            paths = [f"{notes}/{name}" for name in ADDED_NAMES if f"{notes}/{name}" in wanted]
            unit = self._places.unit(address)
            if os.path.lexists(unit / "added") or any(os.path.lexists(unit / "site" / path) for path in paths):
                continue
            if paths:
                self._add(address, {path: wanted[path] for path in paths})

    def layer(self, address: str, area: str) -> str:
        """Return the layer name of a unit's area, and create the link in `layers` if needed."""
        target = f"../units/{address[:2]}/{address}/{area}"
        text = base64.urlsafe_b64encode(bytes.fromhex(address)).decode().rstrip("=")
        for start in range(len(text) - _NAME_LENGTH):
            name = f"{area[0]}{text[start : start + _NAME_LENGTH]}"
            place = self._places.layers / name
            try:
                if os.readlink(place) == target:
                    return name
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.symlink(target, place)
                if os.readlink(place) == target:
                    return name
        raise OSError(f"the directory {self._places.layers} has no free name for unit {address[:12]}")

    def _add(self, address: str, files: Mapping[str, bytes]) -> None:
        lock = try_lock(self._places.unit_lock(address))
        if lock is None:
            return
        unit = self._places.unit(address)
        try:
            with contextlib.suppress(OSError):
                if not os.path.lexists(unit / "added"):
                    for path, content in files.items():
                        _write(unit / "site" / path, content)
                    write_document(unit / "added", {path: _digest(content) for path, content in files.items()})
        finally:
            os.close(lock)


def sweep_layers(places: CachePaths) -> None:
    """Remove the layer names of evicted units."""
    with contextlib.suppress(FileNotFoundError), os.scandir(places.layers) as entries:
        for entry in entries:
            if entry.is_symlink() and not os.path.exists(entry.path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)


def make_layers(places: CachePaths) -> None:
    """Create the directory of layer names and an empty layer, which pads mounts with a single layer."""
    make_public(places.layers)
    make_public(places.layers / "e")


def _notes_directories(number: int, snapshot: Snapshot, outlines: Outlines) -> Iterator[tuple[str, str]]:
    for member in snapshot.roots[number].members:
        if member.kind == "distribution" and (notes := outlines[member.address].dist_info):
            yield member.address, notes


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, and replace a temporary file of a killed process."""
    temporary = path.with_name(f".{path.name}.sgpu")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    fd = os.open(temporary, _MAKE, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(fd, 0o444)
        os.utime(fd, ns=_MTIME)
    temporary.replace(path)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def is_added(path: str) -> bool:
    """Return True if a path of a unit may be an addition, such as `site/<name>.dist-info/RECORD`."""
    folder, name = posixpath.split(path)
    return name in (*ADDED_NAMES, *(f".{each}.sgpu" for each in ADDED_NAMES)) and folder.endswith(".dist-info")


def entry_points(text: str) -> dict[str, str]:
    """Return the scripts that an `entry_points.txt` defines: name → reference (`package.module:function`)."""
    parser = configparser.ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign] # preserves the case of names, as documented
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    found = {}
    for group in GROUPS:
        for name, reference in parser.items(group) if parser.has_section(group) else ():
            if _is_script_name(name) and _REFERENCE.fullmatch(reference or ""):
                found[name] = reference
    return found


def script(reference: str, python: str) -> str:
    """Return the script text that an installer writes for an entry point."""
    match = _REFERENCE.fullmatch(reference)
    assert match is not None, reference  # `entry_points` accepts only matching references.
    function = match["function"]
    body = _TEMPLATE.format(module=match["module"], first=function.partition(".")[0], function=function)
    return shebang(python) + body


def shebang(python: str) -> str:
    """Return the shebang line for an interpreter, or several lines for a long interpreter path."""
    simple = f"#!{python}\n"
    if " " not in python and len(simple.encode()) <= _SHEBANG_BYTES_MAX:
        return simple
    quoted = python.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    return f"#!/bin/sh\n'''exec' \"{quoted}\" \"$0\" \"$@\"\n' '''\n"


def is_generic(content: bytes) -> bool:
    """Return True if a script has the generic shebang line that wheels use."""
    return _GENERIC.match(content) is not None


def specific(content: bytes, python: str) -> bytes:
    """Replace the generic shebang line of a script by the line for an interpreter."""
    return shebang(python).encode() + _GENERIC.sub(b"", content, count=1)


def scripts(points: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the scripts of a distribution: name → text."""
    return {name: script(reference, python) for name, reference in points.items()}


def _is_script_name(name: str) -> bool:
    plain = _NAME.fullmatch(name) is not None and name not in (".", "..") and len(name.encode()) <= 255
    return plain and not _INTERPRETER.fullmatch(name)
