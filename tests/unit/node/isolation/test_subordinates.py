"""The ids that an account without root may use, and the first missing prerequisite with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.isolation.subordinates import SubordinateFacts, chosen, ranges_in
from tests.support.golden import golden

UIDS, GIDS = range(200_000, 265_536), range(500_000, 565_536)
ALL = SubordinateFacts("ana", 1500, 1600, (UIDS,), (GIDS,))


def test_principals_get_the_upper_half_of_the_largest_range_with_equal_uids_outside_of_the_namespace() -> None:
    ids = chosen(ALL._replace(uid_ranges=(range(100_000, 100_010), UIDS)))
    assert ids.uids == range(232_768, 265_536)
    assert ids.uid_map == (0, 1500, 1, 232_768, 232_768, 32_768)
    assert ids.gid_map == (0, 1600, 1, 232_768, 532_768, 32_768)
    assert str(ids) == golden("node.subordinates.ids")


def test_a_configured_range_of_uids_is_used_as_a_whole() -> None:
    ids = chosen(ALL._replace(wanted="200100-200199", gid_ranges=(range(500_000, 500_100),)))
    assert (ids.uids, ids.gid_first) == (range(200_100, 200_200), 500_000)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (ALL._replace(missing_programs=("newuidmap", "newgidmap")), "programs"),
        (ALL._replace(missing_programs=("newgidmap",), uid_ranges=()), "first-missing"),
        (ALL._replace(powerless_programs=("/usr/bin/newuidmap",)), "setuid"),
        (ALL._replace(uid_ranges=()), "no-uids"),
        (ALL._replace(gid_ranges=()), "no-gids"),
        (ALL._replace(uid_ranges=(), gid_ranges=()), "no-ranges"),
        (ALL._replace(uid_ranges=(range(200_000, 200_062),)), "few-uids"),
        (ALL._replace(gid_ranges=(range(500_000, 500_100),)), "few-gids"),
        (ALL._replace(wanted="300000-365535"), "foreign-range"),
        (ALL._replace(is_same_name=True), "same-name"),
        (ALL._replace(no_new_privileges=True), "no-new-privs"),
        (ALL._replace(namespaces_max=0), "max-namespaces"),
        (ALL._replace(debian_forbids=True), "debian"),
        (ALL._replace(apparmor_restricts=True), "apparmor"),
        (ALL._replace(namespace_problem="a user namespace cannot be made: Operation not permitted"), "namespaces"),
    ],
)
def test_27_the_first_missing_prerequisite_is_named_with_its_remedy(facts: SubordinateFacts, name: str) -> None:
    with pytest.raises(IsolationUnavailable) as refused:
        chosen(facts)
    assert f"{refused.value.message} | {refused.value.hint}" == golden(f"node.subordinates.{name}")


def test_a_range_belongs_to_the_name_or_the_number_of_a_user(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_text("bob:100000:65536\n1500:200000:10\nbob:300000:5\ncarol:300000:0\nbroken\nbob:x:1\n")
    assert ranges_in(file, {"bob"}) == (range(100_000, 165_536), range(300_000, 300_005))
    assert ranges_in(file, {"ana", "1500"}) == (range(200_000, 200_010),)
    assert ranges_in(file, {"carol"}) == ranges_in(tmp_path / "missing", {"bob"}) == ()
