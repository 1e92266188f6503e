"""Disks with little room, and disks without any, for tests of what is said and lost there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(size: str, *, at: Path | None = None, options: str = "mode=0700") -> Iterator[Path]:
    """Yield the directory of a file system of its own, in memory; skip where none can be mounted.

    Args:
        size: as `tmpfs` takes it: ``"48m"``.
        at: where it is mounted; a new directory in `/tmp`, unless said.
        options: what else it is mounted with.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    path = at or Path(tempfile.mkdtemp(prefix="sg-disk-", dir="/tmp"))
    path.mkdir(exist_ok=True)
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size},{options}", f"sgpu-test-{os.getpid()}", str(path)]
        done = subprocess.run(mount, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr!r}")
        try:
            yield path
        finally:
            subprocess.run(["umount", "--lazy", str(path)], check=True)  # who has a file open there may still be ending
    finally:
        if at is None:
            path.rmdir()


def fill(path: Path) -> Path:
    """Fill the disk on which a directory lies, to the last byte; return the file that does it."""
    filler = path / "filler"
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return filler
