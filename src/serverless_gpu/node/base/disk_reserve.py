"""Room on the disk that an attempt has from its start, so that its last words can be written when the disk is full.

    <attempt>/.reserve/<number>    allocated, empty of meaning    ── the disk is full ─▶  overwritten, cut, renamed
    <attempt>/facts.jsonl          some room allocated behind its end, moved on as it grows

Room that was given back to the disk first could be taken by whoever filled it; what is overwritten in place cannot. So
an ending, a receipt, the facts and what a rank raised are there also when user code has filled the disk up.

Failure cases: the file system cannot allocate ahead, or allocates anew what is overwritten (btrfs, ZFS): then a full
disk costs the words, as without this; the process that would remove the reserve is killed: it stays with the attempt's
directory, and whoever writes the missing ending (`uplink/unattended.py`, the agent) uses it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from serverless_gpu.node.inside import linux

DIRECTORY = ".reserve"
SIZES = (256 << 10, 64 << 10, 64 << 10, 64 << 10)
"""An ending with the last output of some ranks; a receipt; what a rank raised, in words and pickled."""
FACTS_BYTES = 64 << 10
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def prepare(directory: Path) -> None:
    """Allocate the reserve of an attempt; where that is not possible there is none.

    Args:
        directory: of the attempt.
    """
    with contextlib.suppress(OSError):
        place = directory / DIRECTORY
        place.mkdir(mode=0o700, exist_ok=True)
        for number, size in enumerate(SIZES):
            fd = os.open(place / str(number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)


def give_back(directory: Path) -> None:
    """Give back what was not needed.

    Args:
        directory: of the attempt.
    """
    shutil.rmtree(directory / DIRECTORY, ignore_errors=True)
    with contextlib.suppress(OSError):
        facts = directory / "facts.jsonl"
        os.truncate(facts, facts.stat().st_size)  # what is allocated behind its end


def write(path: Path, data: bytes, directory: Path) -> None:
    """Write a file of an attempt that is either whole or not there; on a full disk into the attempt's reserve.

    Args:
        path: where it goes.
        data: what it says.
        directory: of the attempt.

    Raises:
        OSError: it could not be written, and there is no reserve that is large enough.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if error.errno not in _FULL or not _write_in_place(path, data, directory / DIRECTORY):
            raise


def append_fact(directory: Path, line: bytes, allocated: int) -> int:
    """Append a line to an attempt's facts, and see to it that there is room for the next ones.

    Args:
        directory: of the attempt.
        line: what is appended.
        allocated: up to where there is room, as it was returned last; 0 for not at all.

    Returns:
        Up to where there is room.

    Raises:
        OSError: it could not be appended.
    """
    fd = os.open(directory / "facts.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size + FACTS_BYTES // 2 > allocated:
            with contextlib.suppress(OSError):
                linux.allocate_behind(fd, size, FACTS_BYTES)
                allocated = size + FACTS_BYTES
        if os.write(fd, line) < len(line):
            os.ftruncate(fd, size)  # half a line would spoil the next one, too
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)
    return allocated


def _write_in_place(path: Path, data: bytes, place: Path) -> bool:
    """Turn the smallest reserve that is large enough into a file; return whether there was one."""
    sizes = {}
    with contextlib.suppress(OSError):
        sizes = {entry: entry.stat().st_size for entry in place.iterdir()}
    fitting = sorted((size, entry) for entry, size in sizes.items() if size >= len(data))
    for _, entry in fitting[:1]:
        with contextlib.suppress(OSError):
            fd = os.open(entry, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(fd, data, 0)
                os.ftruncate(fd, len(data))
            finally:
                os.close(fd)
            entry.replace(path)
            return True
    return False
