"""Who has to leave, and who may be where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from serverless_gpu.model.scheduling.preemption import (
    PoolTerms,
    PreemptionPlan,
    Site,
    could_use,
    may_ask,
    may_use,
    plan_preemption,
    standing,
)
from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    CRITICAL,
    NORMAL,
    DeviceShare,
    Node,
    Pool,
    QueuedRun,
    QueuePolicy,
    RunningRun,
)
from tests.support.golden import golden

_S = 1_000_000_000
_NOW = 10_000 * _S
_TERMS = PoolTerms(
    policy=QueuePolicy(), pools={"search": Pool(name="search", reserved=True, lends=True, return_s=300.0)}
)


def wanted(run_id: str, gpus: int = 8, **others: object) -> QueuedRun:
    """Return a run that waits for H100s."""
    base = QueuedRun(run_id=run_id, title=f"alice/{run_id}", owner="alice", queued_ns=0, gpus=gpus, gpu_type="H100")
    return msgspec.structs.replace(base, **others)


def running(run_id: str, gpus: int, age_s: float, on: str = "n1", **others: object) -> RunningRun:
    """Return a run of `BEST_EFFORT` that may be preempted and has devices on one node."""
    base = wanted(run_id, gpus, owner="bob", title=f"bob/{run_id}", priority=BEST_EFFORT, preemptible=True)
    share = DeviceShare(node_id=on, gpu_type="H100", count=gpus)
    asked = msgspec.structs.replace(base, **others)
    return RunningRun(wanted=asked, shares=(share,), since_ns=_NOW - round(age_s * _S))


def site(holders: Sequence[RunningRun], need: int = 8, name: str = "n1", **others: object) -> Site:
    """Return a node with 8 devices, of which everybody has what they have and the rest is free."""
    mine = [share.count for held in holders for share in held.shares if share.node_id == name]
    node = msgspec.structs.replace(Node(id=name, name=name, total={"H100": 8}), **others)
    return Site(node=node, gpu_type="H100", need=need, free=8 - sum(mine), holders=tuple(holders))


def leaving(found: PreemptionPlan | None) -> list[str]:
    """Return who is asked to leave."""
    assert found is not None
    return [preemption.run_id for preemption in found.preemptions]


def test_the_youngest_leave_and_nobody_who_could_stay() -> None:
    holders = [running("old", 4, 9000), running("young", 2, 700), running("middle", 2, 2000)]
    found = plan_preemption(wanted("r1", 4), [site(holders, need=4)], _TERMS, _NOW)
    assert leaving(found) == ["middle", "young"]
    assert found is not None
    assert found.shares == (DeviceShare(node_id="n1", gpu_type="H100", count=4),)
    assert leaving(plan_preemption(wanted("r1", 2), [site(holders, need=2)], _TERMS, _NOW)) == ["young"]


def test_one_large_run_leaves_where_that_loses_less_than_many_small_ones() -> None:
    holders = [running("big", 4, 1000), *(running(f"s{number}", 1, 5000) for number in range(4))]
    assert leaving(plan_preemption(wanted("r1", 4), [site(holders, need=4)], _TERMS, _NOW)) == ["big"]
    holders = [running("big", 4, 9000), *(running(f"s{number}", 1, 700) for number in range(4))]
    assert leaving(plan_preemption(wanted("r1", 4), [site(holders, need=4)], _TERMS, _NOW)) == ["s0", "s1", "s2", "s3"]


def test_the_node_on_which_the_least_is_lost_is_cleared() -> None:
    sites = [site([running("a", 8, 5000)]), site([running("b", 4, 900, "n2")], name="n2")]
    found = plan_preemption(wanted("r1"), sites, _TERMS, _NOW)
    assert leaving(found) == ["b"]
    assert found is not None
    assert found.shares[0].node_id == "n2"


def test_the_lowest_class_that_will_do_leaves_even_where_more_is_lost() -> None:
    sites = [
        site([running("normal", 8, 700, priority=NORMAL)]),
        site([running("spare", 8, 9000, "n2")], name="n2"),
    ]
    assert leaving(plan_preemption(wanted("r1", priority=CRITICAL), sites, _TERMS, _NOW)) == ["spare"]
    assert leaving(plan_preemption(wanted("r1", priority=CRITICAL), sites[:1], _TERMS, _NOW)) == ["normal"]
    assert plan_preemption(wanted("r1", priority=NORMAL), sites[:1], _TERMS, _NOW) is None


@pytest.mark.parametrize(
    "held",
    [
        running("x", 8, 9000, preemptible=False),
        running("x", 8, 9000, preemptions=3),
        running("x", 8, 9000, priority=NORMAL),
        msgspec.structs.replace(running("x", 8, 9000), is_leaving=True),
    ],
)
def test_nobody_leaves_who_cannot_go_on_or_did_so_often_or_is_no_less(held: RunningRun) -> None:
    assert plan_preemption(wanted("r1"), [site([held])], _TERMS, _NOW) is None


def test_who_is_too_young_is_asked_once_enough_are_not() -> None:
    holders = [running("a", 4, 100), running("b", 4, 300)]
    assert plan_preemption(wanted("r1"), [site(holders)], _TERMS, _NOW) == PreemptionPlan(wake_ns=_NOW + 500 * _S)
    assert plan_preemption(wanted("r1", 4), [site(holders, need=4)], _TERMS, _NOW) == PreemptionPlan(
        wake_ns=_NOW + 300 * _S
    )
    assert leaving(plan_preemption(wanted("r1"), [site(holders)], _TERMS, _NOW + 500 * _S)) == ["b", "a"]


def test_where_enough_is_free_or_coming_nobody_else_leaves() -> None:
    there = msgspec.structs.replace(site([running("a", 4, 9000)]), free=8)
    found = plan_preemption(wanted("r1"), [there], _TERMS, _NOW)
    assert found == PreemptionPlan(shares=(DeviceShare(node_id="n1", gpu_type="H100", count=8),))


def test_a_gang_of_several_nodes_has_whole_ones_cleared_and_a_part_of_another() -> None:
    sites = [
        site([running("a", 8, 5000, "n1")], name="n1"),
        site([running("b", 8, 900, "n2")], name="n2"),
        site([running("c", 4, 900, "n3"), running("d", 4, 8000, "n3")], name="n3"),
        site([running("e", 8, 700, "n4")], name="n4"),
    ]
    found = plan_preemption(wanted("r1", 20, several_nodes=True), sites, _TERMS, _NOW)
    assert leaving(found) == ["e", "b", "c"]
    assert found is not None
    assert [(share.node_id, share.count) for share in found.shares] == [("n4", 8), ("n2", 8), ("n3", 4)]
    assert plan_preemption(wanted("r1", 40, several_nodes=True), sites, _TERMS, _NOW) is None


def test_a_pools_own_run_gets_back_at_once_what_was_lent_whatever_its_class() -> None:
    own = wanted("r1", priority=BEST_EFFORT, pool="search")
    lent = site([running("b", 8, 1, preemptions=9)], pool="search")
    found = plan_preemption(own, [lent], _TERMS, _NOW)
    assert leaving(found) == ["b"]
    assert found is not None
    assert found.preemptions[0].sentence == golden("model.preempting.pool-search-lent")
    of_the_pool = site([running("b", 8, 9000, pool="search")], pool="search")
    assert plan_preemption(own, [of_the_pool], _TERMS, _NOW) is None
    found = plan_preemption(msgspec.structs.replace(own, priority=NORMAL), [of_the_pool], _TERMS, _NOW)
    assert found is not None
    assert found.preemptions[0].sentence == golden("model.preempting.makes-room-alice")


def test_an_owner_who_is_first_gets_the_node_at_once_and_gives_way_to_no_guest() -> None:
    others: dict[str, Any] = {"owner": "alice", "owner_first": True}
    mine = wanted("r1", priority=BEST_EFFORT)
    found = plan_preemption(mine, [site([running("b", 8, 1, priority=CRITICAL)], **others)], _TERMS, _NOW)
    assert found is not None
    assert found.preemptions[0].sentence == golden("model.preempting.n1-alice-whose")
    guest = wanted("r2", owner="bob", priority=CRITICAL)
    assert plan_preemption(guest, [site([running("a", 8, 9000, owner="alice")], **others)], _TERMS, _NOW) is None
    assert leaving(plan_preemption(guest, [site([running("c", 8, 9000, owner="carol")], **others)], _TERMS, _NOW)) == [
        "c"
    ]


@pytest.mark.parametrize(
    ("others", "may"),
    [
        ({"priority": BEST_EFFORT, "preemptible": True}, True),
        ({"priority": BEST_EFFORT, "preemptible": True, "grace_s": 301.0}, False),
        ({"priority": BEST_EFFORT, "preemptible": True, "grace_s": 301.0, "limit_s": 300.0}, True),
        ({"priority": BEST_EFFORT, "limit_s": 300.0}, True),
        ({"priority": BEST_EFFORT, "limit_s": 301.0}, False),
        ({"priority": BEST_EFFORT, "limit_s": 690.0, "beyond_s": 390.0}, True),
        ({"priority": BEST_EFFORT, "limit_s": 691.0, "beyond_s": 390.0}, False),
        ({"priority": BEST_EFFORT}, False),
        ({"preemptible": True}, False),
        ({"pool": "search"}, True),
        ({"pool": "default", "priority": BEST_EFFORT, "preemptible": True}, False),
    ],
)
def test_a_reserved_pool_lends_to_who_can_give_back_in_time(others: dict[str, Any], may: bool) -> None:
    node = Node(id="n1", name="n1", pool="search", total={"H100": 8})
    run = wanted("r1", **others)
    assert could_use(run, node, _TERMS) is may
    assert may_use(run, node, _TERMS, _NOW) is may
    assert standing(run, node, _TERMS) == (False, run.pool != "search")
    closed = PoolTerms(policy=QueuePolicy(), pools={"search": Pool(name="search", reserved=True)})
    assert could_use(run, node, closed) is (run.pool == "search")
    on_demand = PoolTerms(policy=QueuePolicy())
    assert could_use(run, node, on_demand) is (run.pool in ("", "search"))
    assert standing(run, node, on_demand) == (False, False)


@pytest.mark.parametrize(
    ("others", "node", "may"),
    [
        ({}, {"shared": False}, True),
        ({"owner": "bob"}, {"shared": False}, False),
        ({"owner": "bob"}, {}, True),
        ({"owner": "bob"}, {"turns_ns": _NOW + 60 * _S}, False),
        ({"owner": "bob", "limit_s": 60.0}, {"turns_ns": _NOW + 60 * _S}, True),
        ({"owner": "bob", "limit_s": 61.0}, {"turns_ns": _NOW + 60 * _S}, False),
        ({"owner": "bob", "preemptible": True}, {"turns_ns": _NOW + 60 * _S}, True),
        ({"owner": "bob", "preemptible": True}, {"turns_ns": _NOW}, False),
        ({}, {"turns_ns": _NOW + 60 * _S}, True),
        ({"owner": "bob"}, {"owner_first": True}, False),
        ({"owner": "bob", "preemptible": True}, {"owner_first": True}, True),
        ({}, {"shared": False, "owner": ""}, False),
        ({}, {"turns_ns": _NOW + 60 * _S, "owner": ""}, False),
        ({}, {"owner_first": True, "owner": ""}, True),
    ],
)
def test_others_are_on_a_persons_node_while_it_is_shared_and_as_long_as_they_can_leave(
    others: dict[str, Any], node: dict[str, Any], may: bool
) -> None:
    there = msgspec.structs.replace(Node(id="n1", name="n1", owner="alice", total={"H100": 8}), **node)
    assert may_use(wanted("r1", **others), there, _TERMS, _NOW) is may


_HELD = st.lists(st.tuples(st.integers(1, 8), st.integers(600, 99_999), st.integers(0, 3)), max_size=9)


@given(_HELD, st.integers(1, 24))
def test_the_set_makes_room_nobody_in_it_could_stay_and_it_loses_at_most_twice_the_least(
    held: Sequence[tuple[int, int, int]], need: int
) -> None:
    holders = [running(f"r{number}", gpus, age, preemptions=done) for number, (gpus, age, done) in enumerate(held)]
    there = Site(
        node=Node(id="n1", name="n1", total={"H100": 99}), gpu_type="H100", need=need, free=0, holders=tuple(holders)
    )
    may = {
        held.wanted.run_id: (
            held.wanted.gpus or 0,
            held.wanted.gpus * (_NOW - held.since_ns) if held.wanted.gpus else 0,
        )
        for held in holders
        if held.wanted.preemptions < 3
    }
    ways = [
        way
        for size in range(1, len(may) + 1)
        for way in combinations(may, size)
        if sum(may[run_id][0] for run_id in way) >= need
    ]
    found = plan_preemption(wanted("new", need), [there], _TERMS, _NOW)
    if not ways:
        assert found is None
        return
    chosen = leaving(found)
    spare = sum(may[run_id][0] for run_id in chosen) - need
    assert spare >= 0
    assert all(may[run_id][0] > spare for run_id in chosen)
    lost = sum(may[run_id][1] for run_id in chosen)
    assert lost <= 2 * min(sum(may[run_id][1] for run_id in way) for way in ways)


_RUNS = st.builds(
    lambda owner, pool, priority: wanted("x", owner=owner, pool=pool, priority=priority, preemptible=True),
    st.sampled_from(["alice", "bob"]),
    st.sampled_from(["", "search"]),
    st.sampled_from([CRITICAL, NORMAL, BEST_EFFORT]),
)


@given(
    st.lists(_RUNS, min_size=2, max_size=5),
    st.sampled_from(["", "alice"]),
    st.sampled_from(["", "search"]),
    st.booleans(),
)
def test_on_a_node_nobody_is_pushed_out_by_who_was_pushed_out_for_them(
    runs: Sequence[QueuedRun], owner: str, pool: str, first: bool
) -> None:
    node = Node(id="n1", name="n1", owner=owner, pool=pool, owner_first=first, total={"H100": 8})
    named = [msgspec.structs.replace(run, run_id=f"r{number}") for number, run in enumerate(runs)]
    out = {
        (one.run_id, other.run_id)
        for one in named
        for other in named
        if may_ask(one, RunningRun(wanted=other, shares=(), since_ns=0), node, _TERMS) is not None
    }
    # Whoever pushes out is above whoever is pushed out: there is an order, so there is no circle.
    left = {run.run_id for run in named}
    while left:
        tops = {run_id for run_id in left if not any((other, run_id) in out for other in left)}
        assert tops
        left -= tops
