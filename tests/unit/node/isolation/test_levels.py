"""The level that a node offers, missing prerequisites, and what a killed trial left behind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from serverless_gpu.node.isolation import levels
from serverless_gpu.node.isolation.levels import remove_orphans
from tests.support.golden import golden

REFUSED = "the kernel refuses it"


@pytest.mark.parametrize(
    ("seal", "sandbox", "own_uid", "level", "problem"),
    [
        ("", "", "", "sandbox", ""),
        ("", "", REFUSED, "sandbox", ""),
        ("", REFUSED, "", "user", REFUSED),
        (REFUSED, "", "", "user", REFUSED),
        ("", "no namespaces", REFUSED, "none", REFUSED),
        ("no Landlock", "", REFUSED, "none", REFUSED),
    ],
)
def test_the_strongest_level_whose_trial_succeeds_is_offered(
    monkeypatch: pytest.MonkeyPatch, seal: str, sandbox: str, own_uid: str, level: str, problem: str
) -> None:
    outcomes = {"sandbox": sandbox, "own_uid": own_uid}

    def rehearse(module: str, uid: int, environ: Mapping[str, str]) -> str:
        return outcomes[module]

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("serverless_gpu.node.inside.seal.problem", lambda: seal)
    monkeypatch.setattr(levels, "_rehearse", rehearse)
    assert levels.measure({}) == (level, problem)


def test_a_process_without_root_cannot_try_the_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1500)
    level = levels.measure({})
    assert (level.level, level.problem) == ("none", golden("node.levels.not-root"))


def test_27_the_directory_of_a_killed_trial_is_removed_and_that_of_a_running_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgpu-rehearsal-abcdefgh" / "root").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    remove_orphans(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(levels, "_ORPHAN_S", -1.0)
    remove_orphans(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
