"""Who of those that wait may start in one tick: caps at once, and rooms of budgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.billing.budget import Subject
from serverless_gpu.model.scheduling.concurrency_limits import WaitingRun, held_back, is_full
from tests.support.golden import golden


def waiting(
    run_id: str, gpus: int | None = 1, *, owner: str = "alice", policy: str = "p", kind: str = ""
) -> WaitingRun:
    subject = Subject(owner=owner, policy=policy)
    return WaitingRun(run_id=run_id, subject=subject, gpus=gpus, gpu_type=kind or None)


def test_nobody_is_held_where_no_policy_has_a_cap() -> None:
    assert held_back([waiting("r1", 100), waiting("r2", None)], {("p", "alice"): 100}, {"other": 1}) == {}


def test_a_cap_is_for_one_user_under_one_policy_and_counted_in_the_order_of_the_queue() -> None:
    queue = [
        waiting("r1", 2),
        waiting("r2", 2),
        waiting("r3", 1),
        waiting("b1", 4, owner="bob"),
        waiting("f1", 9, policy=""),
    ]
    assert held_back(queue, {("p", "alice"): 2}, {"p": 4}) == {
        "r2": golden("model.admitting.usage-policy-allows"),
        "r3": golden("model.admitting.usage-policy-allows"),
    }
    assert held_back(queue[:1], {("p", "alice"): 3}, {"p": 4}) == {
        "r1": golden("model.admitting.usage-policy-allows-alice")
    }


def test_who_waits_for_other_devices_is_not_in_the_way() -> None:
    queue = [waiting("h", 4, kind="H100"), waiting("a", 4, kind="A10"), waiting("a2", 1, kind="A10")]
    assert list(held_back(queue, {}, {"p": 4})) == ["a2"]


@pytest.mark.parametrize(("gpus", "wants"), [(5, "5"), (None, "every GPU of a node")])
def test_what_can_never_fit_under_a_cap_that_came_later_is_told_so_and_in_nobody_s_way(
    gpus: int | None, wants: str
) -> None:
    found = held_back([waiting("r1", gpus), waiting("r2", 4)], {}, {"p": 4})
    assert found == {"r1": golden("model.admitting.usage-policy-allows-alice-2", wants=wants)}


class _Purse:
    """Room for so many runs."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.asked: list[str] = []

    def take(self, candidate: WaitingRun) -> str:
        self.asked.append(candidate.run_id)
        self.left -= 1
        return "" if self.left >= 0 else "nothing is left"


def test_rooms_are_asked_in_order_and_only_for_those_whose_policy_lets_them() -> None:
    purse = _Purse(1)
    queue = [waiting("r1", 4), waiting("r2", 1), waiting("b1", owner="bob"), waiting("b2", owner="bob")]
    found = held_back(queue, {("p", "alice"): 1}, {"p": 4}, purse)
    assert found["b2"] == "nothing is left" and list(found) == ["r1", "r2", "b2"]
    assert purse.asked == ["b1", "b2"]


def test_what_a_budget_holds_takes_no_devices_of_a_cap() -> None:
    class Closed:
        def take(self, candidate: WaitingRun) -> str:
            return "closed" if candidate.run_id == "r1" else ""

    assert held_back([waiting("r1", 4), waiting("r2", 4)], {}, {"p": 4}, Closed()) == {"r1": "closed"}


@given(
    queue=st.lists(st.tuples(st.integers(1, 6), st.sampled_from("ab"), st.sampled_from(["H100", "A10"])), max_size=12),
    used=st.dictionaries(st.tuples(st.just("p"), st.sampled_from("ab")), st.integers(0, 8)),
    cap=st.integers(1, 8),
)
def test_what_is_let_through_for_the_same_devices_fits_under_the_cap_and_the_first_that_fits_is(
    queue: list[tuple[int, str, str]], used: dict[tuple[str, str], int], cap: int
) -> None:
    candidates = [waiting(f"r{n}", gpus, owner=owner, kind=kind) for n, (gpus, owner, kind) in enumerate(queue)]
    out = held_back(candidates, used, {"p": cap})
    for owner in "ab":
        for kind in ("H100", "A10"):
            line = [one for one in candidates if (one.subject.owner, one.gpu_type) == (owner, kind)]
            through = [one for one in line if one.run_id not in out]
            have = used.get(("p", owner), 0)
            assert not through or have + sum(one.gpus or 0 for one in through) <= cap
            first = next((one for one in line if (one.gpus or 0) <= cap), None)
            assert first is None or (first in through) == (have + (first.gpus or 0) <= cap)


def test_once_more_when_it_is_placed() -> None:
    assert not is_full(None, 100, 100) and not is_full(4, 2, 2) and is_full(4, 2, 3)
