"""What is kept of a node's Ray when it is over.

Ray writes a file per process below its sessions' directories. They are kept in the attempt's directory: the last
`_FILE_BYTES_MAX` of each, the newest first until `_BYTES_MAX` are reached.

Failure cases: the disk is full, a file goes away while it is read: what can be kept is kept, and nothing is said, for
the run's outcome does not hang on it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_FILE_BYTES_MAX = 16 << 20
_BYTES_MAX = 256 << 20
_FILES_MAX = 5_000
_PIECE_BYTES = 1 << 20


def save_logs(directory: str, kept: str) -> None:
    """Copy what Ray's processes wrote.

    Args:
        directory: the cluster's own directory on this node.
        kept: where they are kept; made.
    """
    left = _BYTES_MAX
    with contextlib.suppress(OSError):
        os.makedirs(kept, 0o700, exist_ok=True)
        for path, name in _newest_first(directory):
            if left <= 0:
                return
            with contextlib.suppress(OSError):
                left -= _copy(path, os.path.join(kept, name), min(left, _FILE_BYTES_MAX))


def _newest_first(directory: str) -> list[tuple[str, str]]:
    found: list[tuple[float, str, str]] = []
    for path, name in _logs(directory):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if status.st_size:
                found.append((-status.st_mtime, path, name))
    return [(path, name) for _, path, name in sorted(found)[:_FILES_MAX]]


def _logs(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the files that Ray wrote, each with what it is called where it is kept."""
    for number in _entries(directory):
        start = os.path.join(directory, number)
        # The first try is nearly always the one there is; later ones must not write over it.
        prefix = "" if number == "1" else f"start-{number}/"
        for session in _entries(start):
            path = os.path.join(start, session)
            if os.path.isfile(path) and session.endswith(".log"):
                yield path, f"{prefix}{session}"
            elif not os.path.islink(path):
                for place, _, files in os.walk(os.path.join(path, "logs")):
                    within = os.path.relpath(place, os.path.join(path, "logs"))
                    yield from ((os.path.join(place, name), os.path.join(prefix, within, name)) for name in files)


def _entries(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _copy(path: str, target: str, bytes_max: int) -> int:
    """Copy the end of a file; return how many bytes that were."""
    target = os.path.normpath(target)
    os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    copied = 0
    with open(os.open(path, flags), "rb") as source, open(target, "wb") as file:
        source.seek(max(0, os.fstat(source.fileno()).st_size - bytes_max))
        while copied < bytes_max and (piece := source.read(min(_PIECE_BYTES, bytes_max - copied))):
            copied += file.write(piece)
    return copied
