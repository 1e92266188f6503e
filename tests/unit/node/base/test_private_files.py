"""Private files that must not replace others, with and without hard links."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from serverless_gpu.node.base.private_files import NO_LINKS, write_private


@pytest.fixture(params=[None, *NO_LINKS])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where a file is to be, on a file system that has hard links, or answers that it has none."""
    if request.param is not None:

        def refused(*_: object) -> None:
            raise OSError(request.param, os.strerror(request.param))

        monkeypatch.setattr(os, "link", refused)
    return tmp_path / "key"


def test_23C7_a_new_file_is_whole_and_its_owners(path: Path) -> None:
    write_private(path, b"secret", replace=False)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"secret", 0o600)
    assert os.listdir(path.parent) == ["key"]


def test_23C7_one_that_is_there_stays(path: Path) -> None:
    path.write_bytes(b"first")
    write_private(path, b"second", replace=False)
    assert path.read_bytes() == b"first"
    assert os.listdir(path.parent) == ["key"]


def test_23C7_of_many_who_write_at_once_one_wins_and_stays(path: Path) -> None:
    seen: list[bytes] = []

    def write(number: int) -> None:
        write_private(path, b"%d" % number, replace=False)
        seen.append(path.read_bytes())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8 and set(seen) == {path.read_bytes()}


def test_23C7_another_error_of_a_link_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(OSError, match="I/O error"):
        write_private(tmp_path / "key", b"secret", replace=False)
    assert os.listdir(tmp_path) == []
