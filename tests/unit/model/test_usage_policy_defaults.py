"""What a usage policy puts into a run that says nothing of it: a time limit, a team."""

from __future__ import annotations

import pytest

from serverless_gpu.errors import PolicyViolation
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.model.usage_policy import UsagePolicy, describe, with_defaults
from tests.support.golden import golden

HOUR = UsagePolicy(timeout_s=3600.0)
SEARCH = UsagePolicy(team="search")
REQUIRED = UsagePolicy(team_required=True)


@pytest.mark.parametrize(("asked", "limit"), [(None, 3600.0), (60.0, 60.0), (7200.0, 7200.0)])
def test_22D7_a_policy_has_a_time_limit_for_runs_that_name_none(asked: float | None, limit: float) -> None:
    assert with_defaults([("p", HOUR)], RunSpec(timeout_s=asked), ()).timeout_s == limit


def test_22D7_a_policy_that_says_nothing_changes_nothing() -> None:
    spec = RunSpec(name="train")
    assert with_defaults([], spec, ()) == with_defaults([("p", UsagePolicy())], spec, ("ads",)) == spec


@pytest.mark.parametrize(
    ("asked", "teams", "team"),
    [(None, ("ads", "search"), "search"), ("ads", ("ads", "search"), "ads"), (None, ("ads",), None), (None, (), None)],
)
def test_22D7_a_policy_has_a_team_for_runs_that_name_none(
    asked: str | None, teams: tuple[str, ...], team: str | None
) -> None:
    assert with_defaults([("p", SEARCH)], RunSpec(team=asked), teams).team == team


def test_22D7_the_first_policy_that_says_something_holds() -> None:
    policies = [("a", UsagePolicy()), ("b", HOUR), ("c", UsagePolicy(timeout_s=60.0, team="ads")), ("d", SEARCH)]
    made = with_defaults(policies, RunSpec(), ("ads", "search"))
    assert (made.timeout_s, made.team) == (3600.0, "ads")


def test_22D7_a_team_that_is_required_is_the_only_one_of_its_owner() -> None:
    assert with_defaults([("p", REQUIRED)], RunSpec(), ("ads",)).team == "ads"
    assert with_defaults([("p", REQUIRED)], RunSpec(team="search"), ("ads", "search")).team == "search"


@pytest.mark.parametrize(
    ("teams", "hint"),
    [
        (("search", "ads"), "set team= to one of: ads, search"),
        ((), "an operator can add you: sgpu team join TEAM USER"),
    ],
)
def test_22D7_a_run_without_the_team_that_is_required_is_refused(teams: tuple[str, ...], hint: str) -> None:
    with pytest.raises(PolicyViolation) as refused:
        with_defaults([("p", REQUIRED)], RunSpec(), teams)
    assert str(refused.value) == golden("model.policy_defaults.usage-policy-requires", hint=hint)


def test_22D7_people_read_what_a_policy_says_of_teams_and_time() -> None:
    said = describe(UsagePolicy(timeout_s=7200.0, team="ads", team_required=True))
    assert said == [
        "any on-demand pool",
        golden("model.policy_defaults.time-limit-00"),
        golden("model.policy_defaults.team-ads-itself"),
        "needs a team",
    ]
