"""Which teams a run counts for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.billing.budget import Subject, keys, share_team, teams_charged


@pytest.mark.parametrize(
    ("team", "member_of", "charged", "share"),
    [
        ("", (), (), ""),
        ("", ("search",), ("search",), "search"),
        ("", ("vision", "search"), ("search", "vision"), "search"),
        ("search", ("vision", "search"), ("search",), "search"),
        ("search", (), ("search",), "search"),
    ],
)
def test_22A9_a_run_without_a_team_counts_for_all_teams_of_its_owner(
    team: str, member_of: tuple[str, ...], charged: tuple[str, ...], share: str
) -> None:
    assert teams_charged(team, member_of) == charged and share_team(team, member_of) == share
    scopes = keys(Subject(owner="alice", team=team, member_of=member_of))
    assert [name for kind, name in scopes if kind == "team"] == list(charged)


@given(team=st.sampled_from(["", "a", "b"]), member_of=st.lists(st.sampled_from(["a", "b", "c"])).map(tuple))
def test_22A9_leaving_the_team_out_escapes_no_budget_and_no_share(team: str, member_of: tuple[str, ...]) -> None:
    without = teams_charged("", member_of)
    assert set(without) >= set(teams_charged(team, member_of)) if team in member_of else True
    assert (share_team("", member_of) in member_of) is bool(member_of)
