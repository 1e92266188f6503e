"""Reads a directory's distributions from `.dist-info`, and decides how far to trust RECORD.

The module opens only small metadata files: RECORD, INSTALLER, entry_points.txt and installers' metadata files. An
`.egg-info` directory, or a `.dist-info` directory without RECORD, does not list its files. Both kinds of directories
occur on Debian. All files that no RECORD lists belong to the root's unowned unit.

A unit's rows are canonical, because they omit all parts of RECORD that differ between installers. A wheel therefore has
the same rows with pip and uv, in any prefix or `--target` directory, on any machine:

    RECORD's path                        row
    numpy/__init__.py                    site/numpy/__init__.py
    ../../../share/man/x.1               prefix/share/man/x.1
    ../../../bin/f2py                    –            an entry point: restore makes it again
    ../../../bin/jp.py                   prefix/bin/jp.py, its first line read as `#!python`
    *.pyc, RECORD, RECORD.jws, …         –            restore makes it again
    INSTALLER, direct_url.json, …        –            a note, stored beside the unit
"""

from __future__ import annotations

import binascii
import csv
import posixpath
import re
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.scan.directory_listing import ListedFile, Listing
from serverless_gpu.environment.snapshot_validation import NOTE_BYTES_MAX, NOTE_NAMES
from serverless_gpu.errors import EnvironmentUnsupported

DROPPED_NAMES = frozenset({"RECORD", "RECORD.jws", "RECORD.p7s"})
# With `--target`, pip and uv put these prefix directories beside the packages.
_FLAT_AREAS = frozenset({"bin", "etc", "include", "man", "share"})
_INSTALLERS = frozenset(
    {"conda-pypi", "distlib", "flit", "hatch", "installer", "pdm", "pip", "pipenv", "poetry", "pixi", "rye", "uv"}
)
"""Installers that write RECORD from the installed files and do not modify the files afterwards."""
TRUSTED_AFTER_NS = 2 * 10**9
"""Number of seconds by which a trusted file may be newer than RECORD.

Some file systems store modification times with low resolution.
"""
SCRIPT_BYTES_MAX = 1024 * 1024
_SHEBANG = re.compile(rb"#![^\n]*\bpython[0-9.]*[^\n]*\n", re.IGNORECASE)
# pip, uv and distlib write this shebang if the interpreter's path contains a space or is too long for the kernel. A
# shebang with `/bin/sh` makes the shell start the interpreter.
_SHELL_SHEBANG = re.compile(rb"#!/bin/sh\r?\n'''exec' [^\n]*\n' '''\r?\n")
_DIST_INFO = re.compile(r"(?P<name>[^/]+?)-(?P<version>[^/-]+)\.dist-info")
RECORD_BYTES_MAX = 256 * 1024 * 1024


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """An installed distribution."""

    name: str
    version: str
    info: str  # name of the distribution's ``.dist-info`` directory
    claims: list[RecordLine]
    trusted: bool
    record: ListedFile
    scripts: frozenset[str]
    notes: dict[str, str]


def read_distributions(site: Listing) -> list[Distribution]:
    """Return the distributions whose RECORD lists their files, sorted by name."""
    infos = (path for path in site.directories if path.endswith(".dist-info") and "/" not in path)
    found = [one for info in sorted(infos) if (one := _read_distribution(site, info)) is not None]
    return sorted(found, key=lambda one: (one.name, one.version, one.info))


def _read_distribution(site: Listing, info: str) -> Distribution | None:
    named = parse_info_name(info)
    record = site.files.get(f"{info}/RECORD")
    if named is None or record is None:
        return None
    notes = {}
    for name in sorted(NOTE_NAMES):
        file = site.files.get(f"{info}/{name}")
        if file is not None and file.size <= NOTE_BYTES_MAX:
            text = read_text(file.file)
            if "\0" not in text and len(text.encode()) <= NOTE_BYTES_MAX:
                notes[f"site/{info}/{name}"] = text
    entry_points = site.files.get(f"{info}/entry_points.txt")
    return Distribution(
        name=named[0],
        version=named[1],
        info=info,
        claims=parse_record(read_text(record.file)),
        trusted=is_known_installer(notes.get(f"site/{info}/INSTALLER", "")),
        record=record,
        scripts=frozenset() if entry_points is None else parse_scripts(read_text(entry_points.file)),
        notes=notes,
    )


def read_text(path: str) -> str:
    """Read a small file as text, and replace invalid UTF-8."""
    try:
        with open(path, "rb") as file:
            content = file.read(RECORD_BYTES_MAX + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > RECORD_BYTES_MAX:
        raise EnvironmentUnsupported(f"{path} is too large for a metadata file", hint="remove it")
    return content.decode(errors="replace")


def unreadable(path: str, error: OSError) -> EnvironmentUnsupported:
    """Return the error for a file that cannot be read."""
    return EnvironmentUnsupported(
        f"cannot read {path}: {error.strerror or error}",
        hint="make this file readable, or remove it (in a project: name it in .sgpuignore)",
    )


class RecordLine(NamedTuple):
    """A line of RECORD: the unmodified path, the SHA-256 (or b""), and the size (or -1)."""

    path: str
    sha256: bytes
    size: int


def normal_name(name: str) -> str:
    """Return the normalized name of a distribution, for example ``scikit-learn``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_info_name(directory: str) -> tuple[str, str] | None:
    """Return the name and version from a ``.dist-info`` directory's name, or None for other names."""
    match = _DIST_INFO.fullmatch(directory)
    return (normal_name(match["name"]), match["version"]) if match else None


def parse_record(text: str) -> list[RecordLine]:
    """Return the parsed lines of a RECORD file.

    The parser replaces an invalid digest with b"". The parser skips lines without a path.
    """
    claims = []
    for fields in csv.reader(text.splitlines()):
        if not fields or not fields[0]:
            continue
        path, digest, size = (*fields, "", "")[:3]
        claims.append(RecordLine(path, _sha256(digest), int(size) if size.isascii() and size.isdigit() else -1))
    return claims


def parse_scripts(entry_points: str) -> frozenset[str]:
    """Return the names of the scripts that installers generate from ``entry_points.txt``."""
    names, wanted = set(), False
    for line in entry_points.splitlines():
        line = line.strip()
        if line.startswith("["):
            wanted = line in ("[console_scripts]", "[gui_scripts]")
        elif wanted and "=" in line and not line.startswith(("#", ";")):
            names.add(line.partition("=")[0].strip())
    return frozenset(names)


def row_path(recorded: str, site: str, prefix: str) -> str | None:
    """Return the row path of a path from RECORD, or None for a path outside of the prefix.

    `site` is the path of the library below its prefix, for example ``lib/python3.11/site-packages``. `site` is "" for a
    flat directory (`pip install --target`), which is both library and prefix.
    """
    if recorded.startswith("/"):
        if not recorded.startswith(prefix + "/"):
            return None
        path = posixpath.normpath(recorded[len(prefix) + 1 :])
    elif site and ".." not in recorded and "./" not in recorded and "//" not in recorded:
        return f"site/{recorded}"
    else:
        path = posixpath.normpath(posixpath.join(site, recorded))
    if not site:
        # The function drops each leading `..` from the path, because pip writes RECORD for a build directory.
        while path.startswith("../"):
            path = path[3:]
        return f"prefix/{path}" if path.partition("/")[0] in _FLAT_AREAS else f"site/{path}"
    if path.startswith(site + "/"):
        return f"site/{path[len(site) + 1 :]}"
    return None if path.startswith("..") else f"prefix/{path}"


def flat_path(path: str) -> str:
    """Return the row path of a file in a flat directory."""
    return f"prefix/{path}" if path.partition("/")[0] in _FLAT_AREAS and "/" in path else f"site/{path}"


def is_dropped(path: str) -> bool:
    """Return True if a row never belongs to a unit, for example bytecode, RECORD or installer metadata."""
    if path.endswith(".pyc"):
        return True
    directory, _, name = path.rpartition("/")
    return (name in DROPPED_NAMES or name in NOTE_NAMES) and directory.endswith(".dist-info")


def is_entry_script(path: str, scripts: frozenset[str], distribution: str = "") -> bool:
    """Return True if a row is a script that an installer generated from an entry point."""
    if not path.startswith("prefix/bin/"):
        return False
    name = path[len("prefix/bin/") :]
    # pip also installs its own script under the name `pip3.11`, with the running Python's version.
    return name in scripts or (distribution in ("pip", "setuptools") and re.sub(r"-?[\d.]+$", "", name) in scripts)


def is_known_installer(installer: str) -> bool:
    """Return True if the RECORD files of an installer are trusted, for example ``uv`` or ``Poetry 1.8.2``."""
    return installer.strip().partition(" ")[0].lower() in _INSTALLERS


def is_trusted(claim: RecordLine, *, size: int, mtime_ns: int, record_mtime_ns: int) -> bool:
    """Return True if a file very probably matches the RECORD of a known installer."""
    return bool(claim.sha256) and claim.size == size and mtime_ns <= record_mtime_ns + TRUSTED_AFTER_NS


def normalise_script(content: bytes) -> bytes | None:
    """Return a script with `#!python` as its first line, or None if the file is not a Python script."""
    for pattern in (_SHEBANG, _SHELL_SHEBANG):
        match = pattern.match(content)
        if match:
            return b"#!python\n" + content[match.end() :]
    return None


def module_name(path: str) -> str:
    """Return the import name of the module or package that a row belongs to, or ""."""
    area, _, rest = path.partition("/")
    if area != "site":
        return ""
    first, _, below = rest.partition("/")
    if below:
        return first if first.isidentifier() else ""
    stem, _, ending = first.partition(".")
    return stem if stem.isidentifier() and ending.endswith(("py", "so", "pyd")) else ""


def _sha256(digest: str) -> bytes:
    if not digest.startswith("sha256="):
        return b""
    try:
        read = binascii.a2b_base64(digest[7:].replace("-", "+").replace("_", "/") + "=")
    except binascii.Error:
        return b""
    return read if len(read) == 32 else b""
