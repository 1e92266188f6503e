"""Seals of units: what the file system said of every file when its bytes were last known to be right.

    unit unpacked, every byte verified ─ seal ─▶ note
    later: one sweep over the unit ─▶ the same seal? nothing was written to
                                    └ another one ─▶ every byte is read

A mounted unit cannot be written through its mount, but its owner can reach the files by their path below the cache. A
write that keeps the size and puts the modification time back still moves the inode's change time, which cannot be set;
a file or directory that is moved in from elsewhere has another inode. So a sweep finds both without reading a byte.

Bytecode comes later and has times of its own: each file is written down when it has been compiled.

Must not: decide what happens to a unit that was changed (`unit_cache.py`).

Failure case: a process of the cache's owner that also rewrites what is noted here is not found; separate users need
separate uids.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from serverless_gpu.environment.restore.cache.cache_directory import read_document, write_document
from serverless_gpu.environment.restore.cache.shared_metadata import is_added

LOOK_S = 600
"""How long a unit that was looked at in this boot of the machine is not looked at again."""
BYTECODE = "bytecode"
_DOCUMENTS = ("unit", "outline")
_ADDED_ENDINGS = ("RECORD", "INSTALLER", ".sgpu")

Identity = tuple[int, int, int, int, int]
"""Inode, size, modification time, change time, mode."""


class Sweep(NamedTuple):
    """One look at all files of a unit."""

    files: bytes  # digest of the identities of its own files, links and directories
    documents: bytes
    bytecode: dict[str, Identity]  # identity of each compiled file, by its path in the unit


def sweep_unit(unit: Path) -> Sweep:
    """Return what the file system says of a unit."""
    top = str(unit)
    digest = blake3()
    bytecode: dict[str, Identity] = {}
    waiting = [area for area in ("site", "prefix") if os.path.isdir(f"{top}/{area}")]
    while waiting:
        here = waiting.pop()
        is_cache = here.endswith("/__pycache__")
        with os.scandir(f"{top}/{here}") as entries:
            found = sorted(entries, key=_name)
        seen: list[str | Identity | int] = []
        for entry in found:
            name, status = entry.name, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{here}/{name}")
                if name != "__pycache__":
                    seen += name, status.st_ino
            elif is_cache and ".pyc" in name:
                bytecode[f"{here}/{name}"] = _identity(status)
            elif name.endswith(_ADDED_ENDINGS) and is_added(f"{here}/{name}"):
                continue
            else:
                seen += name, _identity(status)
        if seen or not is_cache:
            digest.update(_bytes(here, seen))
    return Sweep(digest.digest(), _documents(unit), bytecode)


def note_bytecode(unit: Path, targets: Iterable[str]) -> None:
    """Write down bytecode that was compiled just now; the caller holds the unit's lock.

    Args:
        unit: its directory.
        targets: absolute paths; those that are not there were not compiled.
    """
    known = dict(known_bytecode(unit))
    for target in targets:
        try:
            known[os.path.relpath(target, unit)] = _identity(os.lstat(target))
        except FileNotFoundError:
            continue
    write_document(unit / BYTECODE, known)


def known_bytecode(unit: Path) -> dict[str, Identity]:
    """Return what was written down of a unit's bytecode."""
    return read_document(unit / BYTECODE, dict[str, Identity]) or {}


def _bytes(here: str, seen: list[str | Identity | int]) -> bytes:
    try:
        return msgspec.msgpack.encode((here, seen))
    except UnicodeEncodeError:  # no unit has such a name, so this seal is none that was noted
        return ascii((here, seen)).encode()


def _documents(unit: Path) -> bytes:
    return blake3(msgspec.msgpack.encode([_identity(os.lstat(unit / name)) for name in _DOCUMENTS])).digest()


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name
