"""What the file system of a home grants, and what is said where it does not."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from serverless_gpu.errors import StorageError
from serverless_gpu.node.attempt.claim import take_attempt
from serverless_gpu.node.base.requirements import (
    flock_refusal,
    record_lock_refusal,
    require_flock,
    require_record_locks,
)
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
