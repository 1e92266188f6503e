"""Disk space reserved for an attempt from its start, so that its ending fits on a full disk.

    <attempt>/.reserve/<number>    allocated, empty of meaning    ── the disk is full ─▶  overwritten, cut, renamed
    <attempt>/facts.jsonl          some room allocated behind its end, moved on as it grows

Space given back to the disk could be taken by the process that filled it; what is overwritten in place cannot. So an
ending, a receipt, the facts and a rank's exception survive a full disk.

Failure cases: the file system cannot allocate ahead, or copies on write (btrfs, ZFS): a full disk costs these files, as
without a reserve; the process that would remove the reserve is killed: it stays, and the writer of the missing ending
(`uplink/orphans.py`, the agent) uses it.
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
    """Allocate the reserve of an attempt, if the file system can."""
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
    """Give back the unused reserve."""
    shutil.rmtree(directory / DIRECTORY, ignore_errors=True)
    with contextlib.suppress(OSError):
        facts = directory / "facts.jsonl"
        os.truncate(facts, facts.stat().st_size)  # what is allocated behind its end


def write(path: Path, data: bytes, directory: Path) -> None:
    """Write a file of an attempt whole or not at all; on a full disk into the attempt's reserve.

    Raises OSError when it cannot be written and no reserve is large enough.
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
    """Append a line to an attempt's facts and allocate space behind it; raises OSError.

    `allocated` is the offset this function returned last, up to which there is space; 0 at first.
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
