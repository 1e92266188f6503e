"""The level that a node offers, from the outcomes of its trials."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from serverless_gpu.node.isolation import levels

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


def test_a_process_without_the_rights_of_root_offers_no_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert levels.measure({}).level == "none"
