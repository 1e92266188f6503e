"""The distributions of a directory: what their `.dist-info` says was installed, and how far it can be believed.

Only small files are opened: RECORD, INSTALLER, entry_points.txt and notes. An `.egg-info`, and a `.dist-info` without
RECORD (Debian has both), owns nothing that could be known: their files belong to the unowned unit.
"""

from __future__ import annotations

import msgspec

from serverless_gpu.environment.rules.limits import NOTE_BYTES_MAX, NOTE_NAMES
from serverless_gpu.environment.scan.canonical import (
    RecordLine,
    is_known_installer,
    parse_info_name,
    parse_record,
    parse_scripts,
)
from serverless_gpu.environment.scan.directory_listing import ListedFile, Listing
from serverless_gpu.errors import EnvironmentUnsupported

RECORD_BYTES_MAX = 256 * 1024 * 1024


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """One installed distribution."""

    name: str
    version: str
    info: str  # name of its ``.dist-info`` directory
    claims: list[RecordLine]
    trusted: bool
    record: ListedFile
    scripts: frozenset[str]
    notes: dict[str, str]


def read_distributions(site: Listing) -> list[Distribution]:
    """Return the distributions that say what they consist of, in order of their names.

    Raises:
        EnvironmentUnsupported: one of their files cannot be read; names it.
    """
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
    """Return a small file as text; what is not UTF-8 is replaced.

    Raises:
        EnvironmentUnsupported: it cannot be read, or it is not small.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(RECORD_BYTES_MAX + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > RECORD_BYTES_MAX:
        raise EnvironmentUnsupported(f"{path} is too long to be what its name says", hint="remove it")
    return content.decode(errors="replace")


def unreadable(path: str, error: OSError) -> EnvironmentUnsupported:
    """Return the error for a file that cannot be read."""
    return EnvironmentUnsupported(
        f"cannot read {path}: {error.strerror or error}",
        hint="make it readable, or remove it (in a project: name it in .sgpuignore)",
    )
