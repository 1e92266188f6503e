"""Which files git tracks: those it never ignores, whatever its patterns say (`git add -f`).

They are read from `.git/index`, versions 2 to 4: git may not be installed, or refuse a repository of another user. What
cannot be read that way (another version, SHA-256 names, an index in parts) is said, and patterns alone decide.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

_HEADER = struct.Struct(">4sII")
_INDEX_BYTES_MAX = 256 * 1024 * 1024
_FIXED = 62  # of an entry: times, ids, mode, size, SHA-1, flags; then its path
_MODE = 24
_EXTENDED = 0x40


def tracked_files(index: str, inside: str) -> list[str] | None:
    """Return the files and submodules below a directory that git tracks; None when the index cannot be read.

    Args:
        index: path of git's index.
        inside: the directory relative to the repository, ending in ``/``, or "".

    Returns:
        Paths relative to the directory.
    """
    start = os.fsencode(inside)
    try:
        with open(index, "rb") as file:
            data = file.read(_INDEX_BYTES_MAX)
        return [os.fsdecode(path[len(start) :]) for path in _paths(data) if path.startswith(start)]
    except FileNotFoundError:
        return []
    except (OSError, struct.error, ValueError, IndexError):
        return None


def index_mtime(index: str) -> int:
    """Return when git's index was last written, or 0 if missing."""
    try:
        return os.stat(index).st_mtime_ns
    except OSError:
        return 0


def _paths(data: bytes) -> Iterator[bytes]:
    """Yield the paths of all files, links and submodules.

    Raises:
        ValueError: it is no index of a known version.
        IndexError: likewise.
    """
    magic, version, count = _HEADER.unpack_from(data)
    if magic != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("no index")
    at, path = _HEADER.size, b""
    for _ in range(count):
        name = at + _FIXED + (2 if data[at + _FIXED - 2] & _EXTENDED else 0)
        kept = 0
        if version == 4:
            cut, name = _number(data, name)
            kept = len(path) - cut
        end = data.index(b"\0", name)
        path = path[:kept] + data[name:end]
        kind = data[at + _MODE + 2] >> 4
        at = end + 1 if version == 4 else end + 8 - (end - at) % 8
        if kind in (0b1000, 0b1010, 0b1110):  # not a directory of a sparse index
            yield path
    if data[at : at + 4] == b"link":
        raise ValueError("the rest is in another file")


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of variable length, and where it ends."""
    byte = data[at]
    value = byte & 127
    while byte & 128:
        at += 1
        byte = data[at]
        value = ((value + 1) << 7) | (byte & 127)
    return value, at + 1
