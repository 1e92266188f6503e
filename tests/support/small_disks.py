"""Disks with little room, and disks without any, for tests of what is said and lost there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
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


class FailingDisk:
    """An ext4 disk in a file, which can turn read-only under its users, as a disk with errors does.

    Args:
        image: the file; made.
        path: where it is mounted.
    """

    def __init__(self, image: Path, path: Path) -> None:
        self.path = path
        self._image = image
        with image.open("wb") as file:
            file.truncate(512 << 20)
        _require(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0", "-O", "^has_journal", str(image)])
        self._mount()

    def fail(self) -> None:
        """Have the kernel find an error: from now on nothing can be written."""
        (Path("/sys/fs/ext4") / self._device.removeprefix("/dev/") / "trigger_fs_error").write_text("1\n")

    def repair(self) -> None:
        """Mount it again, once its users are gone.

        Raises:
            AssertionError: some are still there after half a minute.
        """
        for _ in range(600):
            if subprocess.run(["umount", str(self.path)], capture_output=True, check=False).returncode == 0:
                break
            threading.Event().wait(0.05)
        else:
            raise AssertionError(f"{self.path} is in use")
        subprocess.run(["fsck.ext4", "-p", "-f", str(self._image)], capture_output=True, check=False)
        self._mount()

    def unmount(self) -> None:
        """Unmount it, now or when its last user is gone."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def _mount(self) -> None:
        _require(["mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path)])
        command = ["findmnt", "--noheadings", "--output", "SOURCE", str(self.path)]
        self._device = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def failing_disk() -> Iterator[FailingDisk]:
    """Yield an ext4 disk that can turn read-only; skip where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    around = Path(tempfile.mkdtemp(prefix="sg-disk-", dir="/tmp"))
    path = around / "m"
    path.mkdir()
    try:
        disk = FailingDisk(around / "image", path)
        try:
            yield disk
        finally:
            disk.unmount()
    finally:
        (around / "image").unlink(missing_ok=True)
        path.rmdir()
        around.rmdir()


def _require(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr!r}")
