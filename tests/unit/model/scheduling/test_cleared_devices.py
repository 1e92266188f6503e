"""Room is made for who has more right to it, kept for them until they start, and nobody is pushed about for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given, settings

from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    CRITICAL,
    NORMAL,
    DeviceShare,
    Node,
    Pool,
    PoolSeen,
    QueuedRun,
    QueuePolicy,
    Reservation,
    WaitReason,
)
from tests.support.golden import golden
from tests.support.model.driving import S, World

_SEARCH = Pool(name="search", reserved=True, lends=True, return_s=300.0)


def node(name: str, devices: int = 8, **others: Any) -> Node:
    """Return a node."""
    return msgspec.structs.replace(Node(id=name, name=name, total={"H100": devices}), **others)


def wanted(run_id: str, gpus: int = 8, **others: Any) -> QueuedRun:
    """Return a run of alice's that wants H100s."""
    base = QueuedRun(run_id=run_id, title=f"alice/{run_id}", owner="alice", queued_ns=0, gpus=gpus, gpu_type="H100")
    return msgspec.structs.replace(base, **others)


def spare(run_id: str, gpus: int = 8, **others: Any) -> QueuedRun:
    """Return a run of bob's that may be stopped and goes on later."""
    base = wanted(run_id, gpus, owner="bob", title=f"bob/{run_id}", priority=BEST_EFFORT, preemptible=True)
    return msgspec.structs.replace(base, **others)


def started(world: World, *run_ids: str) -> list[float | None]:
    """Return when runs started for the first time, seconds."""
    return [world.started_ns[run_id] / S if run_id in world.started_ns else None for run_id in run_ids]


def test_a_critical_gang_gets_its_room_and_nobody_else_takes_it_meanwhile() -> None:
    world = World([node("n1")])
    world.submit(spare("b1", 4), 9_000)
    world.submit(spare("b2", 4), 9_000, at_s=100)
    world.submit(wanted("big", 8, priority=CRITICAL), 1_000, at_s=1_000)
    world.submit(wanted("small", 2, priority=CRITICAL, owner="carol"), 1_000, at_s=1_005)
    world.run(1_000)
    assert [(one.run_id, one.for_run) for one in world.preemptions] == [("b1", "big"), ("b2", "big")]
    assert world.planner.reservations() == (
        Reservation(
            run_id="big", shares=(DeviceShare(node_id="n1", gpu_type="H100", count=8),), at_ns=None, is_bound=False
        ),
    )
    wait = world.planner.why("big", world.now_ns)
    assert wait is not None
    assert wait.reason is WaitReason.MAKING_ROOM
    assert all(holder.is_leaving for holder in wait.holders)
    world.run(20_000)
    assert started(world, "big", "small") == [1_010.0, 2_010.0]
    assert len(world.preemptions) == 2
    assert not world.running
    assert not world.waiting


def test_nobody_has_to_leave_for_a_run_that_becomes_a_guest_in_the_same_decision() -> None:
    world = World([node("n1"), node("n2", owner="zoe", owner_first=True)])
    world.submit(spare("b1"), 90_000)
    guest = wanted("guest", 1, owner="amy", priority=CRITICAL, preemptible=True)
    world.submit(guest, 100, at_s=1_000)  # is looked at before the owner has what she wants, and lets others in
    world.submit(wanted("mine", 1, owner="zoe", priority=CRITICAL), 100, at_s=1_000)
    world.run(1_000)
    assert started(world, "guest", "mine") == [1_000.0, 1_000.0]
    assert world.preemptions == []
    assert not world.running["b1"].is_leaving
    world.submit(wanted("late", priority=CRITICAL), 100, at_s=2_000)
    world.run(2_100)
    assert [(one.run_id, one.for_run) for one in world.preemptions] == [("b1", "late")]
    assert started(world, "late") == [2_010.0]


def test_who_is_not_needed_for_a_guest_leaves_for_who_still_waits_and_is_told_so() -> None:
    world = World([node("n1"), node("n2", owner="zoe", owner_first=True)])
    world.submit(spare("b1"), 90_000)
    guest = wanted("guest", 1, owner="amy", priority=CRITICAL, preemptible=True)
    world.submit(guest, 100, at_s=1_000)
    world.submit(wanted("big", 8, owner="ben", priority=CRITICAL), 100, at_s=1_000)
    world.submit(wanted("mine", 1, owner="zoe", priority=CRITICAL), 100, at_s=1_000)
    world.run(1_100)
    assert [(one.run_id, one.for_run) for one in world.preemptions] == [("b1", "big")]
    assert started(world, "guest", "mine", "big") == [1_000.0, 1_000.0, 1_010.0]


def test_nobody_has_to_leave_for_a_run_that_finds_what_was_promised_to_a_guest() -> None:
    world = World([node("n1"), node("n2"), node("n3", 16, owner="zoe", owner_first=True)])
    world.submit(wanted("endless", 4), 90_000)
    world.submit(spare("b1", 4), 90_000)
    world.submit(wanted("timed", 4, limit_s=50_000.0), 50_000, at_s=1)
    gang = wanted("gang", 8, owner="amy", priority=CRITICAL, preemptible=True)
    world.submit(gang, 100, at_s=1_000)  # is promised the node of `timed`, and then is a guest
    world.submit(wanted("one", 1, owner="ben", priority=CRITICAL), 100, at_s=1_000)
    world.submit(wanted("mine", 1, owner="zoe", priority=CRITICAL), 100, at_s=1_000)
    world.run(1_000)
    assert {share.node_id for share in world.running["gang"].shares} == {"n3"}
    assert started(world, "gang", "one", "mine") == [1_000.0, 1_000.0, 1_000.0]
    assert world.preemptions == []


def test_who_has_run_for_too_short_a_time_is_asked_as_soon_as_it_has_not() -> None:
    world = World([node("n1")])
    world.submit(spare("b1"), 9_000)
    world.submit(wanted("big"), 100, at_s=100)
    world.run(1_000)
    assert started(world, "big") == [610.0]  # 600 s, and 10 s to leave


def test_nobody_is_asked_more_often_than_that_by_class() -> None:
    world = World([node("n1")], QueuePolicy(preempt_after_s=0.0))
    world.submit(spare("b1"), 5_000)
    for number in range(6):
        world.submit(wanted(f"r{number}"), 100, at_s=200.0 + 400 * number)
    world.run(20_000)
    assert [one.run_id for one in world.preemptions] == ["b1"] * 3
    assert started(world, "r0", "r1", "r2") == [210.0, 610.0, 1_010.0]
    assert not world.waiting
    assert not world.running


def test_a_run_whose_room_does_not_come_any_more_asks_again_elsewhere() -> None:
    world = World([node("n1"), node("n2")])
    world.submit(spare("b1"), 90_000)
    world.submit(spare("b2"), 90_000, at_s=100)
    world.submit(wanted("big"), 100, at_s=2_000)
    world.run(2_001)
    assert [one.run_id for one in world.preemptions] == ["b2"]
    world.change(msgspec.structs.replace(world.nodes["n2"], away="is drained"))
    world.run(3_000)
    assert [one.run_id for one in world.preemptions] == ["b2", "b1"]
    assert started(world, "big") == [2_011.0]


def test_what_a_pool_lends_is_back_in_time_and_not_lent_again_while_its_own_wait() -> None:
    world = World([node("n1", pool="search"), node("n2", pool="search")])
    world.tell(PoolSeen(_SEARCH))
    for number in range(4):
        world.submit(spare(f"b{number}", 4), 10_000)
    world.submit(spare("late", 4), 10_000, at_s=2)
    world.submit(spare("rude", 4, preemptible=False), 10, at_s=3)
    world.submit(spare("brief", 4, preemptible=False, limit_s=300.0), 200, at_s=4)
    world.submit(wanted("own", 8, pool="search", priority=BEST_EFFORT), 1_000, at_s=30)
    world.run(30)
    assert len(world.running) == 4
    assert len(world.preemptions) == 2
    world.run(60)
    assert started(world, "own", "late", "rude", "brief") == [40.0, None, None, None]
    world.run(100_000)
    assert set(world.waiting) == {"rude"}
    never = world.planner.why("rude", world.now_ns)
    assert never is not None
    assert never.reason is WaitReason.UNSATISFIABLE
    assert not world.running
    assert len(world.preemptions) == 2


def test_an_owner_who_is_first_has_the_node_as_soon_as_others_have_left() -> None:
    world = World([node("n1", owner="alice", owner_first=True)])
    world.submit(spare("b1", 8, priority=CRITICAL), 5_000)
    world.submit(spare("b2", 1, preemptible=False), 10)
    world.submit(wanted("mine", 2, priority=BEST_EFFORT), 1_000, at_s=50)
    world.run(50_000)
    assert started(world, "b1", "mine", "b2") == [0.0, 60.0, None]
    never = world.planner.why("b2", world.now_ns)
    assert never is not None
    assert never.words == golden("model.making_room.owner-comes-first")
    assert [one.run_id for one in world.preemptions] == ["b1"]
    assert not world.running


@pytest.mark.parametrize("gpus", [8, 12], ids=["alice's node is too small", "two gangs exclude each other"])
def test_an_owners_run_that_cannot_start_does_not_keep_guests_off_the_owners_node(gpus: int) -> None:
    world = World([node("n1", pool="search"), node("n2", 4, pool="search", owner="alice", owner_first=True)])
    world.tell(PoolSeen(_SEARCH))
    gang = wanted("gang", 12, owner="bob", pool="search", priority=CRITICAL, preemptible=True, several_nodes=True)
    world.submit(gang, 100)
    # Borrows n1, which the pool does not lend while the gang waits.
    borrower = wanted("mine", gpus, priority=BEST_EFFORT, preemptible=True, several_nodes=gpus > 8)
    world.submit(borrower, 100)
    world.run(1_000)
    assert started(world, "gang", "mine") == [0.0, 100.0]
    assert world.preemptions == []


def test_gangs_of_two_owners_that_need_both_nodes_start_by_class_and_age() -> None:
    world = World([node("n1", owner="alice", owner_first=True), node("n2", owner="bob", owner_first=True)])
    world.submit(wanted("b1", owner="bob"), 1_000)  # The gangs arrive while n2 is in use by its owner.
    gang = wanted("a1", 16, preemptible=True, several_nodes=True)
    world.submit(gang, 100, at_s=1)
    world.submit(msgspec.structs.replace(gang, run_id="b2", owner="bob"), 100, at_s=2)
    world.submit(msgspec.structs.replace(gang, run_id="b3", owner="bob", priority=CRITICAL), 100, at_s=3)
    world.run(5_000)
    assert started(world, "b3", "a1", "b2") == [1_000.0, 1_100.0, 1_200.0]
    assert world.preemptions == []


def test_a_gang_that_waits_for_another_owners_runs_does_not_keep_guests_off_its_node() -> None:
    world = World([node("n1", owner="alice", owner_first=True), node("n2", owner="bob", owner_first=True)])
    world.submit(wanted("b1", owner="bob"), 1_000)
    world.submit(wanted("b2", owner="bob"), 1_000)
    world.submit(wanted("gang", 16, preemptible=True, several_nodes=True), 100, at_s=1)
    world.submit(spare("guest", owner="carol"), 5_000, at_s=2)
    world.run(10_000)
    assert started(world, "guest", "gang") == [2.0, 2_010.0]
    assert [(one.run_id, one.for_run) for one in world.preemptions] == [("guest", "gang")]


@pytest.mark.parametrize("pool", ["search", ""])
def test_two_gangs_with_the_stronger_right_to_one_node_each_do_not_preempt_each_other_in_turn(pool: str) -> None:
    n1 = node("n1", pool=pool, owner="" if pool else "bob", owner_first=not pool)
    world = World([n1, node("n2", 4, pool=pool, owner="alice", owner_first=True)])
    world.tell(PoolSeen(_SEARCH))
    gang = wanted("b1", 12, owner="bob", pool=pool, preemptible=True, several_nodes=True)
    world.submit(gang, 1_000)
    world.submit(
        msgspec.structs.replace(gang, run_id="a1", owner="alice", pool="", priority=BEST_EFFORT), 1_000, at_s=5
    )
    world.submit(wanted("a2", 1, pool=pool), 100, at_s=500)  # Needs only the node of its owner.
    world.run(5_000)
    assert [(one.run_id, one.for_run) for one in world.preemptions] == [("b1", "a2")]
    assert not world.running
    assert not world.waiting


# --- whatever comes ---------------------------------------------------------------------------------------------------

_NODES = st.lists(
    st.builds(
        lambda pool, owner, first, devices: (pool, owner, first, devices),
        st.sampled_from(["", "search", "spot"]),
        st.sampled_from(["", "", "alice", "bob"]),
        st.booleans(),
        st.sampled_from([2, 4, 8]),
    ),
    min_size=1,
    max_size=4,
)
_RUNS = st.lists(
    st.tuples(
        st.sampled_from([CRITICAL, NORMAL, BEST_EFFORT, BEST_EFFORT]),
        st.sampled_from([1, 1, 2, 4, 8, 12]),
        st.sampled_from(["alice", "bob", "carol"]),
        st.sampled_from(["", "", "search"]),
        st.booleans(),  # preemptible
        st.sampled_from([None, 100.0, 2_000.0]),
        st.integers(1, 3_000),  # seconds
        st.integers(0, 4_000),  # when
    ),
    min_size=1,
    max_size=24,
)


def world_of(nodes: list[tuple[str, str, bool, int]], runs: list[tuple[Any, ...]]) -> World:
    """Return a world with all that is to come."""
    named = [
        node(f"n{number}", devices, pool=pool, owner=owner, owner_first=first)
        for number, (pool, owner, first, devices) in enumerate(nodes)
    ]
    world = World(named, QueuePolicy(preempt_after_s=60.0, preemptions_max=2))
    world.tell(PoolSeen(_SEARCH))
    for number, (priority, gpus, owner, pool, preemptible, limit_s, length_s, at_s) in enumerate(runs):
        run = wanted(
            f"r{number}",
            gpus,
            owner=owner,
            priority=priority,
            pool=pool,
            preemptible=preemptible,
            limit_s=limit_s,
            several_nodes=gpus > 8,
        )
        world.submit(run, min(length_s, limit_s or length_s), at_s=at_s)
    return world


# r7 leaves for r6, r6 for r5, and r7, which began beside r5, leaves for the second attempt of r6.
_PUSHED_ON = [
    *([(CRITICAL, 1, "alice", "", False, None, 1, 0)] * 5),
    (CRITICAL, 1, "alice", "search", False, None, 1, 61),
    (NORMAL, 4, "alice", "search", True, None, 71, 1),
    (BEST_EFFORT, 1, "alice", "search", True, None, 131, 0),
]
# r0 is a guest on alice's node, and r1 could only borrow the other node, which r0 waits for.
_CROSSED = [(CRITICAL, 12, "bob", "search", True, None, 1, 0), (BEST_EFFORT, 8, "alice", "", True, None, 1, 0)]
_CROSSED_GANGS = [(CRITICAL, 12, "bob", "search", True, None, 1, 0), (BEST_EFFORT, 12, "alice", "", True, None, 1, 0)]
_OWNERS_GANGS = [(NORMAL, 12, owner, "", True, None, 1, 0) for owner in ("bob", "alice")]
# r1 has the stronger right to n1 and r0 to n0, and each preempts the other if it may use the whole gang's devices.
_IN_TURN = [(CRITICAL, 12, "bob", "search", True, None, 1_000, 0), (BEST_EFFORT, 12, "alice", "", True, None, 1_000, 5)]


@settings(max_examples=150, deadline=None)
@given(_NODES, _RUNS)
@example([("search", "", False, 4)], _PUSHED_ON)
@example([("search", "", False, 8), ("search", "alice", True, 4)], _CROSSED)
@example([("search", "", False, 8), ("search", "alice", True, 4)], _CROSSED_GANGS)
@example([("search", "", False, 8), ("search", "alice", True, 4)], _IN_TURN)
@example([("", "bob", True, 8), ("", "alice", True, 4)], _OWNERS_GANGS)
def test_everybody_who_can_be_served_is_served_and_the_number_of_preemptions_has_a_bound(
    nodes: list[tuple[str, str, bool, int]], runs: list[tuple[Any, ...]]
) -> None:
    world = world_of(nodes, runs)
    asked, left = Counter[tuple[str, str, int]](), Counter[str]()
    for until_s in (*range(0, 4_000, 250), 500_000):
        world.run(until_s)
        for place in world.nodes.values():
            assert world.free(place.id) >= 0
    for one in world.preemptions:
        asked[one.run_id, one.for_run, left[one.for_run]] += 1
        left[one.run_id] += 1
    assert not world.running
    # No attempt asks the same run twice: what it gave back was kept, and its second attempt has another turn before it.
    assert all(count == 1 for count in asked.values()), asked
    by_class = Counter(one.run_id for one in world.preemptions if one.sentence.startswith("the run "))
    assert max(by_class.values(), default=0) <= 2
    # A borrower may leave a pool's node for a gang, and the gang the borrower's own node, but not again and again.
    pairs = Counter((one.run_id, one.for_run) for one in world.preemptions)
    assert all(min(count, pairs[for_run, run_id]) <= 2 for (run_id, for_run), count in [*pairs.items()]), pairs
    for run_id, run in world.waiting.items():
        wait = world.planner.why(run_id, world.now_ns)
        assert wait is not None
        assert wait.reason in (WaitReason.UNSATISFIABLE, WaitReason.CALENDAR), (run, wait)


@settings(max_examples=100, deadline=None)
@given(_NODES, _RUNS)
def test_guests_are_let_in_only_where_nobody_with_more_right_waits_who_could_be_there(
    nodes: list[tuple[str, str, bool, int]], runs: list[tuple[Any, ...]]
) -> None:
    world = world_of(nodes, runs)

    def check() -> None:
        own = [run for run in world.waiting.values() if run.pool == "search"]
        lent_now = [
            held
            for held in world.running.values()
            if held.since_ns == world.now_ns
            and not held.wanted.pool
            and any(world.nodes[share.node_id].pool == "search" for share in held.shares)
        ]
        for held in lent_now:
            assert held.wanted.priority == BEST_EFFORT
            assert held.wanted.preemptible or held.wanted.limit_s == 100.0
            there = [world.nodes[share.node_id] for share in held.shares]
            # Nodes are judged by owner: what only another owner's node is large enough for waits for that one.
            lenders = {(place.owner, place.owner_first) for place in there if place.pool == "search"}
            most = max(
                place.total["H100"]
                for place in world.nodes.values()
                if place.pool == "search" and (place.owner, place.owner_first) in lenders
            )
            fitting = [run for run in own if (run.gpus or 0) <= most]
            first = [place for place in there if place.owner_first and place.owner]
            assert not fitting or first, (held, fitting)

    world.on_decision = check
    world.run(500_000)
