"""Asking whether somebody holds a lock file: never wrong towards "free", and never in the way."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from serverless_gpu.node.base.lock_files import held_note, is_held


def test_a_file_is_held_as_long_as_somebody_has_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert not is_held(path) and held_note(path) is None, "it does not exist"
    path.write_text("4711")
    assert not is_held(path) and held_note(path) is None, "it is only there"
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_held(path) and held_note(path) == b"4711"
    assert not is_held(path)


def test_a_question_leaves_the_lock_free(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    is_held(path)
    held_note(path)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_cannot_be_asked_counts_as_held(tmp_path: Path) -> None:
    link, target = tmp_path / "link.lock", tmp_path / "target"
    target.touch()
    link.symlink_to(target)
    assert is_held(link) and held_note(link) is None


def test_a_pipe_in_its_place_does_not_hang_who_asks(tmp_path: Path) -> None:
    path = tmp_path / "pipe.lock"
    os.mkfifo(path)
    assert not is_held(path) and held_note(path) is None
