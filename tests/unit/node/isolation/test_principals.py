"""The map of principals to uids: durable, without a second owner of a uid, and refused where it cannot be kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.base.protocol import UNKNOWN_OWNER
from serverless_gpu.node.isolation.principals import PLACE, RANGE, UIDS, Principals, free_uid, uid_range
from serverless_gpu.node.isolation.remains import Remain, RemainKind
from serverless_gpu.node.isolation.survey import RemainSurvey
from tests.support.golden import golden


@pytest.fixture(autouse=True)
def own_uids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all homes belong to the user of the test, who may not be root, and nothing else to the uids."""
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: None)
    monkeypatch.setattr("serverless_gpu.node.isolation.principals.survey", lambda uids: RemainSurvey())


def of(place: Path, uids: str = "5000-5002") -> Principals:
    return Principals({PLACE: str(place), RANGE: uids})


def test_each_owner_keeps_its_uid_and_home_also_in_another_agent(tmp_path: Path) -> None:
    alice, bob = (of(tmp_path / "p").of(owner) for owner in ("alice of a", "bob of a"))
    assert (alice.uid, bob.uid) == (5000, 5001)
    assert of(tmp_path / "p").of("alice of a") == alice
    assert Path(alice.home).stat().st_mode & 0o777 == 0o700


def test_27_a_uid_to_which_something_belongs_goes_to_no_new_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Remain(RemainKind.PROCESS, 5000, "7 (sleep)")
    monkeypatch.setattr("serverless_gpu.node.isolation.principals.survey", lambda uids: RemainSurvey([process]))
    (tmp_path / "5001").mkdir()
    assert of(tmp_path).of("alice").uid == 5002
    assert of(tmp_path).of("alice").uid == 5002


def test_27_a_run_of_an_unnamed_owner_gets_no_uid(tmp_path: Path) -> None:
    with pytest.raises(IsolationUnavailable, match="the run's owner"):
        of(tmp_path).of(UNKNOWN_OWNER)


def test_a_full_range_refuses_new_owners_only(tmp_path: Path) -> None:
    known = [of(tmp_path).of(f"owner {number}").uid for number in range(3)]
    with pytest.raises(IsolationUnavailable, match=golden("node.isolation.full")):
        of(tmp_path).of("owner 3")
    assert of(tmp_path).of("owner 1").uid == known[1]


def test_a_uid_of_an_account_of_the_machine_is_skipped() -> None:
    assert free_uid(range(os.getuid(), os.getuid() + 100_000), {}) != os.getuid()


@pytest.mark.parametrize("text", ["a-b", "5", "0-9", "9-5", "5000-", "-5000", "٥-٦"])
def test_a_setting_that_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(IsolationUnavailable):
        uid_range(text)


def test_without_a_setting_the_default_range_is_used() -> None:
    assert uid_range("") == UIDS


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"alice": "x"}'])
def test_a_damaged_map_refuses_runs_and_is_not_replaced(tmp_path: Path, damaged: bytes) -> None:
    of(tmp_path).of("alice")
    (tmp_path / "uids.json").write_bytes(damaged)
    with pytest.raises(IsolationUnavailable):
        of(tmp_path).of("bob")
    assert (tmp_path / "uids.json").read_bytes() == damaged


def test_the_map_is_on_the_disk_before_the_uid_is_used(tmp_path: Path) -> None:
    of(tmp_path).of("alice")
    assert json.loads((tmp_path / "uids.json").read_bytes()) == {"alice": 5000}
