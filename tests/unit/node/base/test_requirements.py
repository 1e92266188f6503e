"""What the file system of a home and the kernel grant, and what is said where they do not."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

from serverless_gpu.engines.base import NodeLost
from serverless_gpu.engines.local import LocalEngine
from serverless_gpu.errors import HardwareError, StorageError
from serverless_gpu.node.attempt.claim import take_attempt
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.requirements import (
    flock_refusal,
    pidfd_refusal,
    record_lock_refusal,
    require_flock,
    require_pidfd,
    require_record_locks,
)
from serverless_gpu.node.processes import daemon
from serverless_gpu.node.uplink.server import UplinkProfile
from tests.support.golden import golden


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Have a kind of lock refused in this process."""

    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, name, refused)


def test_23C3_a_file_system_that_grants_locks_is_asked_and_nothing_remains(tmp_path: Path) -> None:
    assert (flock_refusal(tmp_path), record_lock_refusal(tmp_path)) == ("", "")
    require_flock(tmp_path)
    require_record_locks(tmp_path, "a database")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_23C3_a_home_whose_locks_are_refused_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse(monkeypatch, "flock", code)
    with pytest.raises(StorageError) as refused:
        require_flock(tmp_path)
    assert refused.value.message == golden(
        "node.filesystems.cannot-used-file", tmp_path=tmp_path, strerror=os.strerror(code)
    )
    assert "SERVERLESS_GPU_HOME" in refused.value.hint and "-o flock" in refused.value.hint
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="refuses file locks"):
        take_attempt(tmp_path)


def test_23C3_a_directory_in_which_no_file_can_be_made_says_that(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=golden("node.filesystems.cannot-write-gone")):
        require_flock(tmp_path / "gone")


def test_23C10_a_database_of_sqlite_names_the_directory_that_grants_no_record_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "lockf", errno.ENOLCK)
    with pytest.raises(StorageError) as refused:
        require_record_locks(tmp_path, "the server's database")
    assert refused.value.message == golden("node.filesystems.server-database-cannot", tmp_path=tmp_path)


def refuse_pidfd(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Have `pidfd_open` fail in this process."""

    def refused(_: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refused)


def test_23C4_a_kernel_with_pidfd_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pidfd_refusal() == ("", "")
    refuse_pidfd(monkeypatch, errno.EMFILE)  # a limit of this process, which says nothing about the kernel
    require_pidfd()


def test_23C4_a_python_that_was_built_for_older_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(HardwareError, match=re.escape(golden("node.kernel.build-python-os"))) as refused:
        require_pidfd()
    assert golden("node.kernel.built-newer-system") in refused.value.hint


def test_23C4_a_node_of_a_server_says_that_it_can_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs used to begin there four times, and to fail four times."""
    refuse_pidfd(monkeypatch, errno.ENOSYS)
    monkeypatch.setattr(daemon, "start", lambda *_, **__: pytest.fail("an uplink was started"))
    home = tmp_path / "home"
    home.mkdir()
    profile = UplinkProfile(url="http://127.0.0.1:1", token="t", name="here")
    engine = LocalEngine(Home(home), tmp_path / "engine", profile=profile, environ={})
    (event,) = engine.events()
    assert isinstance(event, NodeLost) and event.sentence.startswith("this machine cannot run ranks: Linux ")
    assert engine.nodes() == []
