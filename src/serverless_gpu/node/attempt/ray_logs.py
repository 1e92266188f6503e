"""Keeps the logs of a node's Ray when it is over.

    supervisor, when no process of the attempt is left:  /tmp/sgpu-ray-*/<start>/session_*/logs ─▶ <attempt>/ray/<node>

Ray writes a file per process below its sessions' directories. The supervisor keeps the last `FILE_BYTES_MAX` of each,
the newest first up to `BYTES_MAX`, because every process that could explain an end is dead by then.

Failure cases: the disk is full, a file is a pipe or a link (skipped; the run's outcome does not depend on it); the disk
is slow (copying ends after `LIMIT_NS`, because the devices wait, and the receipt says so).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from serverless_gpu.ambient import Clock

FILE_BYTES_MAX = 16 << 20
BYTES_MAX = 256 << 20
_FILES_MAX = 5_000
_PIECE_BYTES = 1 << 20
LIMIT_NS = 5_000_000_000


def save_logs(directory: str, kept: str, clock: Clock) -> str:
    """Copy Ray's logs to `kept`; return a sentence if the time did not suffice for all of them, else ""."""
    left, until_ns = BYTES_MAX, clock.boottime_ns() + LIMIT_NS
    with contextlib.suppress(OSError):
        os.makedirs(kept, 0o700, exist_ok=True)
        files = _newest_first(directory, clock, until_ns)
        for number, (path, name) in enumerate(files):
            if left <= 0:
                break
            if clock.boottime_ns() > until_ns:
                return f"{len(files) - number} of {len(files)} logs of Ray were not kept: copying them took too long"
            with contextlib.suppress(OSError):
                left -= _copy(path, os.path.join(kept, name), min(left, FILE_BYTES_MAX))
    return ""


def _newest_first(directory: str, clock: Clock, until_ns: int) -> list[tuple[str, str]]:
    found: list[tuple[float, str, str]] = []
    for path, name in _logs(directory):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_size:
                found.append((-status.st_mtime, path, name))
        if clock.boottime_ns() > until_ns:
            break
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
                logs = os.path.join(path, "logs")
                for place, _, files in () if os.path.islink(logs) else os.walk(logs):
                    within = os.path.relpath(place, logs)
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
