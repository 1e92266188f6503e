"""`sgpu node sweep`: finds what principals left on this machine, and frees the uid of a principal who has left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serverless_gpu.errors import IsolationUnavailable, NotAllowed
from serverless_gpu.node.isolation.principals import PLACE, RANGE, PrincipalMap, Principals
from tests.support.cli.cli import sgpu
from tests.support.golden import golden

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can look at all processes")


@pytest.fixture
def ana(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home directory of a principal of this machine."""
    monkeypatch.setenv(PLACE, str(tmp_path / "principals"))
    monkeypatch.setenv(RANGE, "1899998000-1899998009")
    return Path(Principals(os.environ).of("ana of s", tmp_path).home)


@root
def test_a_node_without_remains_says_so(ana: Path) -> None:
    assert sgpu("node", "sweep").stdout.strip() == golden("cli.node_sweep.nothing")
    assert '"swept_ns"' in sgpu("node", "sweep", "--json").stdout


@root
def test_a_principal_who_has_left_is_forgotten_with_its_home(ana: Path) -> None:
    (ana / "notes").touch()
    with pytest.raises(IsolationUnavailable, match="--delete-home"):
        sgpu("node", "sweep", "--forget", "ana")
    assert golden("cli.node_sweep.forgotten") in sgpu("node", "sweep", "--forget", "ana", "--delete-home").stdout
    assert not ana.exists() and PrincipalMap(os.environ).read() == {}


@root
def test_a_home_is_deleted_only_together_with_its_principal(ana: Path) -> None:
    assert sgpu("node", "sweep", "--delete-home").exit_code == 2
    assert ana.exists()


def test_only_root_may_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1500)
    with pytest.raises(NotAllowed, match="only root"):
        sgpu("node", "sweep")
