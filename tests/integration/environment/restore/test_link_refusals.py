"""A tree is filled from units: links where they can be made, copies where not; nothing is followed or replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.environment.restore.link_tree import ContentSource, fill
from tests.support.environment.linking import part, write
from tests.support.environment.restored_process import CANNOT_MOUNT, public_directory
from tests.support.small_disks import small_disk


@pytest.fixture
def other_disk() -> Iterator[Path]:
    with small_disk("16m") as place:
        yield place


@pytest.mark.skipif(os.geteuid() != 0 or bool(CANNOT_MOUNT), reason="only root mounts a file system")
def test_another_file_system_gets_copies_and_says_why(tmp_path: Path, other_disk: Path) -> None:
    one = write(tmp_path / "one", a__x="1", a__y="2")
    linked = fill(other_disk, [ContentSource(part(), [one])])
    assert (linked.linked, linked.copied, linked.why_copied) == (0, 2, "Invalid cross-device link")
    status = (other_disk / "a/x").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o444, 10**18)


def protects_hard_links() -> bool:
    try:
        return Path("/proc/sys/fs/protected_hardlinks").read_text().strip() == "1"
    except OSError:
        return False


@pytest.mark.skipif(os.geteuid() != 0 or not protects_hard_links(), reason="needs root, and a kernel that refuses")
def test_files_of_somebody_else_are_copied_where_the_kernel_refuses_links() -> None:
    with public_directory() as directory:
        one = write(directory / "one", x="1")
        tree = directory / "tree"
        tree.mkdir()
        os.chown(tree, 65534, 65534)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(65534)
                os.setuid(65534)
                linked = fill(tree, [ContentSource(part(), [one])])
                os.write(writing, f"{linked.linked} {linked.copied} {linked.why_copied}".encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        with open(reading) as said:
            assert said.read() == "0 1 Operation not permitted"
