"""Isolation levels: which level of a node satisfies which minimum of a pool."""

from __future__ import annotations

import itertools

import pytest

from serverless_gpu.model.isolation import LEVELS, NONE, SANDBOX, Level, lowers, reaches


@pytest.mark.parametrize(("offered", "minimum"), [*itertools.product(LEVELS, LEVELS)])
def test_a_level_satisfies_itself_and_all_weaker_levels(offered: Level, minimum: Level) -> None:
    order = list(LEVELS)
    assert reaches(offered, minimum) is (order.index(offered) >= order.index(minimum))


def test_a_level_that_this_version_does_not_know_counts_as_none() -> None:
    assert not reaches("microvm", SANDBOX)
    assert reaches("microvm", NONE)


@pytest.mark.parametrize(("before", "after"), [*itertools.product((*LEVELS, "unset"), (*LEVELS, "unset"))])
def test_a_change_lowers_isolation_if_runs_lose_a_level_or_share_a_uid_for_the_first_time(
    before: str, after: str
) -> None:
    weakest_first = ["none", "unset", *LEVELS[1:]]
    lower = weakest_first.index(after) < weakest_first.index(before)
    assert lowers(before, after) is lower
