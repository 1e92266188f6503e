"""`sgpu server rotate` killed between any two of its steps: the next one finishes it, and nothing of before is good."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.errors import ServerProblem
from serverless_gpu.server.operations import rotation
from tests.support.crash.rotation import Killed, made


def test_22A1_rotate_replaces_key_and_tokens_and_says_what_people_have_to_do(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = made(home, monkeypatch)
    rotated = server.rotate()
    server.check()
    assert rotated.contexts == 2
    assert rotated.revoked == (("alice", 1),)
    assert [secret.name for secret in rotated.secrets] == ["HF"]
    assert rotated.nodes == ("n1",)  # of another machine than this one


def test_22A1_a_rotation_that_was_killed_anywhere_is_finished_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, killed_at = made(tmp_path / "first", monkeypatch), 0
    while True:
        killed_at += 1
        server = first.copied(tmp_path / f"{killed_at}")
        try:
            server.rotate(killed_at=killed_at)
        except Killed:
            with pytest.raises(ServerProblem, match="interrupted"):
                rotation.refuse_unfinished(server.settings.directory)
            server.rotate()
            server.check()
        else:
            break
    assert killed_at > 8
