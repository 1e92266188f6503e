"""Files that a supervisor mounts into the mount namespace of a stem, seen from inside that namespace."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.isolation.grafts import Graft, graft

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can enter mount namespaces")

OWNER, OTHER = 61_001, 61_002
WAITING = "import sys; print('ready', flush=True); sys.stdin.read()"


@contextlib.contextmanager
def stem() -> Iterator[subprocess.Popen[str]]:
    """Yield a process with its own mount namespace."""
    argv = ["unshare", "--mount", "--propagation", "private", sys.executable, "-I", "-S", "-c", WAITING]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def grafted(process: subprocess.Popen[str], *grafts: Graft) -> None:
    pidfd = os.pidfd_open(process.pid)
    try:
        os.close(graft(pidfd, grafts, os.geteuid()))
    finally:
        os.close(pidfd)


def inside(process: subprocess.Popen[str], uid: int, command: str) -> str:
    """Return the output of a command in the namespace of the stem."""
    enter = ["nsenter", f"--mount=/proc/{process.pid}/ns/mnt", "setpriv", f"--reuid={uid}", f"--regid={uid}"]
    argv = [*enter, "--clear-groups", "sh", "-c", f"{command} 2>&1"]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20).stdout.strip()


def test_27_secrets_are_files_of_their_owner_in_memory_of_one_mount_namespace(tmp_path: Path) -> None:
    place = secret_files.write(tmp_path, {"TOKEN": b"hunter2-hunter2", "KEY": b"k" * 5_000})
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory, stem() as process:
        os.chmod(directory, 0o755)
        at = Path(directory, "secrets")
        at.mkdir()
        grafted(process, Graft(str(place), str(at), owner=OWNER))
        secret_files.remove(tmp_path)  # The copies do not depend on the files of the node.
        assert not list(at.iterdir()), "no other mount namespace shows the copies"
        assert inside(process, OWNER, f"cat {at}/TOKEN; stat -c '%a %u %g %n' {at} {at}/*").splitlines() == [
            f"hunter2-hunter2500 {OWNER} {OWNER} {at}",
            f"400 {OWNER} {OWNER} {at}/KEY",
            f"400 {OWNER} {OWNER} {at}/TOKEN",
        ]
        assert "Permission denied" in inside(process, OTHER, f"cat {at}/TOKEN")
        assert "Read-only" in inside(process, OWNER, f"chmod 644 {at}/TOKEN")
        assert "Read-only" in inside(process, 0, f"touch {at}/more")
        mounts = Path(f"/proc/{process.pid}/mountinfo").read_text().splitlines()
        mount = next(line for line in mounts if str(at) in line)
        assert {"ro", "nosuid", "nodev", "noexec"} <= set(mount.split()[5].split(","))
        options = set(mount.split(" - ")[1].split()[2].split(","))
        assert {"size=12k", "nr_inodes=3", "noswap"} <= options, "the copies fit, and nothing else"


def test_a_secret_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    with stem() as process, pytest.raises(OSError, match=r"cannot be mounted.*missing"):
        grafted(process, Graft(str(tmp_path / "missing"), str(tmp_path), owner=OWNER))
