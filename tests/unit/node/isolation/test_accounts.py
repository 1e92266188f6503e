"""Which accounts of the operating system a principal may use, and what an account brings with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.isolation import accounts
from serverless_gpu.node.isolation.accounts import SETTING, AccountEntry, AccountRules, chosen, first_ids
from serverless_gpu.node.isolation.principals import PLACE, RANGE, Principals
from tests.support.golden import golden

ANA = AccountEntry("ana", 1500, 1600, "/home/ana", "/bin/bash", (1600, 2000, 27, 999, 1700), 1500)
RULES = AccountRules(uid_min=1000, gid_min=1000, ours=(0, 1400), uids=range(5000, 6000))


def test_an_account_brings_its_groups_of_people_and_its_home() -> None:
    uid, account = chosen("ana", ANA, RULES)
    assert (uid, account.name, account.gid, account.home) == (1500, "ana", 1600, "/home/ana")
    assert account.groups == (1700, 2000), "without the groups of the system, such as docker and sudo"


def test_a_primary_group_of_the_system_stays() -> None:
    assert chosen("ana", ANA._replace(gid=100), RULES)[1].gid == 100  # `users` on some distributions


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (None, "missing"),
        ({"name": "Ana"}, "other-name"),
        ({"uid": 0}, "root"),
        ({"gid": 0}, "root"),
        ({"uid": 999, "home_uid": 999}, "system"),
        ({"uid": 65_534, "home_uid": 65_534}, "system-nobody"),
        ({"uid": 1400, "home_uid": 1400}, "ours"),
        ({"uid": 5500, "home_uid": 5500}, "range"),
        ({"shell": "/usr/sbin/nologin"}, "nologin"),
        ({"shell": "/bin/false"}, "false"),
        ({"home": ""}, "no-path"),
        ({"home": "/home/../root"}, "dots"),
        ({"home_uid": None}, "no-home"),
        ({"home_uid": 0}, "home-of-root"),
    ],
)
def test_an_unsuitable_account_is_refused_with_the_remedy(change: dict[str, Any] | None, problem: str) -> None:
    entry = None if change is None else ANA._replace(**change)
    with pytest.raises(IsolationUnavailable) as refused:
        chosen("ana", entry, RULES)
    assert refused.value.message == golden(f"node.accounts.{problem}")
    assert "SERVERLESS_GPU_ACCOUNTS=range" in refused.value.hint


def test_the_setting_decides_and_an_unknown_account_never_gets_another_uid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {PLACE: str(tmp_path / "p"), RANGE: "5000-5999", SETTING: "same-name"}
    monkeypatch.setattr(accounts, "look_up", {"ana": ANA}.get)
    monkeypatch.setattr(accounts, "first_ids", lambda: (1000, 1000))
    principal = Principals(environ).of("ana of https://server:8080", tmp_path)
    assert (principal.uid, principal.home) == (1500, "/home/ana")
    with pytest.raises(IsolationUnavailable, match="no account of"):
        Principals(environ).of("bob of https://server:8080", tmp_path)
    assert not (tmp_path / "p" / "uids.json").exists()


def test_the_account_that_owns_the_home_of_the_node_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "look_up", lambda name: ANA._replace(uid=os.getuid() or 1500))
    monkeypatch.setattr(accounts, "first_ids", lambda: (1, 1))
    if os.getuid() == 0:
        os.chown(tmp_path, 1500, 1500)
    with pytest.raises(IsolationUnavailable, match="processes or files"):
        Principals({PLACE: str(tmp_path / "p"), SETTING: "same-name"}).of("ana of x", tmp_path)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(IsolationUnavailable, match=golden("node.accounts.setting")):
        Principals({SETTING: "ldap"}).of("ana of x")


def test_the_smallest_ids_of_people_come_from_login_defs(tmp_path: Path) -> None:
    (tmp_path / "login.defs").write_text("# UID_MIN 5\nUID_MIN\t\t 500\n  GID_MIN 600\nSYS_UID_MIN 100\n")
    assert first_ids(tmp_path / "login.defs") == (500, 600)
    assert first_ids(tmp_path / "missing") == (1000, 1000)


def test_an_account_that_the_machine_does_not_have_is_none() -> None:
    assert accounts.look_up("no-such-account-27") is None
    root = accounts.look_up("root")
    assert root is not None and root.uid == 0
