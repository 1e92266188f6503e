"""Gangs on several nodes: how they are put together, promised, made room for, and told why they wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from serverless_gpu.model.placement import NODES_MAX
from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    DeviceShare,
    Node,
    NodeSeen,
    Pool,
    PoolSeen,
    QueuedRun,
    QueuePolicy,
    RunningRun,
    WaitReason,
)
from serverless_gpu.model.scheduling.wait_messages import estimate_text
from tests.support.golden import golden
from tests.support.model.asking import Decided, S, busy, decide, node, planner, wanted
from tests.support.model.driving import World


def gang(run_id: str, gpus: int, **others: object) -> QueuedRun:
    """Return a run that may have several nodes."""
    return msgspec.structs.replace(wanted(run_id, gpus), **{"several_nodes": True, **others})


def having(decided: Decided, run_id: str) -> list[tuple[str, int]]:
    """Return what a run was given."""
    placements = {one.run_id: one.shares for one in decided.decision.placements}
    return [(share.node_id.removeprefix("id-"), share.count) for share in placements.get(run_id, ())]


@pytest.mark.parametrize(
    ("gpus", "nodes", "given"),
    [
        (16, {"n1": 8, "n2": 8, "n3": 8}, [("n1", 8), ("n2", 8)]),
        (12, {"n1": 8, "n2": 8}, [("n1", 8), ("n2", 4)]),
        (4, {"n1": 1, "n2": 1, "n3": 1, "n4": 1}, [("n1", 1), ("n2", 1), ("n3", 1), ("n4", 1)]),
        (12, {"n1": 8, "n2": 6, "n3": 6}, [("n2", 6), ("n3", 6)]),  # nothing is left over, the large one stays whole
        (12, {"n1": 8, "n2": 4, "n3": 8}, [("n1", 8), ("n2", 4)]),
        (8, {"n1": 8, "n2": 4, "n3": 4}, [("n1", 8)]),  # one will do
    ],
)
def test_a_gang_has_whole_nodes_and_one_part_on_as_few_nodes_as_possible(
    gpus: int, nodes: dict[str, int], given: list[tuple[str, int]]
) -> None:
    decided = decide([gang("r1", gpus)], [node(name, H100=count) for name, count in nodes.items()])
    assert sorted(having(decided, "r1")) == given


def test_a_part_of_a_large_node_spares_small_ones() -> None:
    nodes: list[Any] = [busy(node("n1", H100=16), 6), *(node(f"s{number}", H100=4) for number in range(3))]
    assert having(decide([gang("r1", 18)], nodes), "r1") == [("s0", 4), ("s1", 4), ("n1", 10)]


def test_a_part_goes_where_the_least_is_left_over() -> None:
    nodes: list[Any] = [node("n1", H100=8), node("n2", H100=8), busy(node("n3", H100=8), 4)]
    assert having(decide([gang("r1", 12)], nodes), "r1") == [("n1", 8), ("n3", 4)]


def test_what_one_node_could_hold_waits_for_it() -> None:
    decided = decide([gang("r1", 8)], [busy(node("n1", H100=8), 1), node("n2", H100=4), node("n3", H100=4)])
    assert decided.placed() == {}
    assert decided.said("r1") == golden("model.several_nodes.needs-h100-one")


def test_a_large_node_that_a_run_may_never_use_does_not_keep_it_on_one() -> None:
    large = msgspec.structs.replace(node("n1", H100=16), pool="gold")
    made = planner([large, node("n2", H100=8), node("n3", H100=8)], [gang("r1", 16)])
    made.apply([PoolSeen(Pool(name="gold", reserved=True, lends=True))])
    assert having(Decided(made), "r1") == [("n2", 8), ("n3", 8)]


def test_a_gang_is_of_one_pool_and_one_type() -> None:
    two = [msgspec.structs.replace(node(name, H100=8), pool=pool) for name, pool in (("n1", "a"), ("n2", "b"))]
    assert decide([gang("r1", 16)], two).said("r1") == golden("model.several_nodes.needs-16-h100")
    mixed = [Node(id=name, name=name, total={kind: 4}) for name, kind in (("n1", "A100-40"), ("n2", "A100-80"))]
    assert decide([gang("r1", 8, gpu_type="A100")], mixed).wait("r1").reason is WaitReason.UNSATISFIABLE


def test_a_node_that_knows_no_crews_has_no_part_of_a_gang_and_runs_of_its_own() -> None:
    old = msgspec.structs.replace(node("n1", H100=8), crews=False)
    decided = decide([gang("r1", 16), gang("r2", 8)], [old, node("n2", H100=8)])
    assert having(decided, "r2") == [("n1", 8)]
    assert decided.said("r1") == golden("model.several_nodes.needs-16-h100-only")


def test_F82_how_much_there_is_together_and_what_a_flag_costs_is_said_at_once() -> None:
    four = [msgspec.structs.replace(node(f"n{number}", H100=8), pool="research") for number in range(4)]
    assert decide([gang("r1", 40)], four).said("r1") == golden("model.several_nodes.needs-40-h100")
    alone = wanted("r1", 16, alone="without same_node=True")
    assert decide([alone], four).said("r1") == golden("model.several_nodes.needs-16-h100-one")
    assert "would do" not in decide([wanted("r1", 40, alone="without same_node=True")], four).said("r1")
    live = wanted("r1", 16, machine="machine-n0", alone='with env="snapshot"')
    assert decide([live], four).said("r1").endswith('(n0); with env="snapshot" 2 nodes would be enough')
    many = [node(f"n{number}", A10=1) for number in range(NODES_MAX + 10)]
    assert decide([gang("r1", NODES_MAX + 1, gpu_type="A10")], many).said("r1") == golden(
        "model.several_nodes.needs-a10-gang", value=NODES_MAX + 1, NODES_MAX=NODES_MAX
    )


def test_who_waits_for_several_nodes_is_told_what_is_free_on_each_and_who_has_the_rest() -> None:
    nodes: list[Any] = [node("n1", H100=8), busy(node("n2", H100=8), 3, limit_s=60.0)]
    decided = decide([gang("r1", 16)], nodes)
    assert decided.said("r1") == golden("model.several_nodes.needs-16-h100-nodes")
    found = decided.planner.estimate(gang("r9", 16, owner="bob", limit_s=60.0), 1000)
    assert (found.at_ns, found.node, found.nodes, found.place) == (60 * S, "", ("n1", "n2"), 1)
    free = decide([], [node("n1", H100=8), node("n2", H100=8)]).planner.estimate(gang("r1", 16), 1000)
    assert estimate_text(free, str) == golden("model.several_nodes.once-n1-n2")
    drained = msgspec.structs.replace(node("n2", H100=8), away="starts no new runs: root drains it")
    told = decide([gang("r1", 16)], [node("n1", H100=8), drained]).said("r1")
    assert told == golden("model.several_nodes.needs-16-h100-n2")
    lacking = msgspec.structs.replace(node("n2", H100=8), outside={"H100": 2})
    assert golden("model.several_nodes.n1-free-n2") in decide([gang("r1", 16)], [node("n1", H100=8), lacking]).said(
        "r1"
    )


def test_what_is_kept_for_several_nodes_is_said_to_others_and_what_fits_in_before_starts() -> None:
    nodes: list[Any] = [node("n1", H100=8), busy(node("n2", H100=8), 8, owner="x", limit_s=3600.0)]
    queue = [
        gang("r1", 16, limit_s=3600.0),
        wanted("r2", 8, owner="bob", limit_s=1800.0),
        wanted("r3", 8, owner="cat", limit_s=7200.0),
    ]
    decided = decide(queue, nodes)
    assert decided.placed() == {"r2": "n1"}
    decided = decide([queue[0], queue[2]], nodes)
    assert decided.placed() == {}
    assert golden("model.several_nodes.kept-alice-r1") in decided.said("r3")


def test_a_gang_goes_into_the_gap_before_a_larger_one() -> None:
    nodes: list[Any] = [node("n1", H100=8), node("n2", H100=8), busy(node("n3", H100=8), 8, owner="x", limit_s=3600.0)]
    queue = [gang("r1", 24, limit_s=60.0), gang("r2", 16, owner="bob", limit_s=1800.0)]
    assert having(decide(queue, nodes), "r2") == [("n1", 8), ("n2", 8)]
    late = [queue[0], gang("r2", 16, owner="bob", limit_s=7200.0)]
    decided = decide(late, nodes)
    assert decided.placed() == {}
    assert decided.said("r2") == golden("model.several_nodes.needs-16-h100-nodes-2")


def test_what_is_kept_for_a_gang_counts_as_free_for_it_elsewhere() -> None:
    held = [busy(node("n2", H100=8), 8, "bob/a", limit_s=3600.0), busy(node("n3", H100=8), 8, "bob/b", limit_s=7200.0)]
    made = planner([node("n1", H100=8), *held], [gang("r1", 16, limit_s=60.0)])
    decided = Decided(made)
    assert made.reservations()[0].shares[1].node_id == "id-n2"
    made.apply([NodeSeen(node("n4", H100=8))])
    assert having(Decided(made, 2000), "r1") == [("n1", 8), ("n4", 8)]
    assert decided.placed() == {}


def test_a_part_is_promised_where_it_is_free_first_though_nobody_knows_when_the_whole_node_is() -> None:
    nodes: list[Any] = [busy(node("n1", H100=8), 8, limit_s=60.0), busy(node("n2", H100=8), 3, "bob/endless")]
    decided = decide([gang("r1", 12)], nodes)
    (promised,) = decided.planner.reservations()
    assert (promised.at_ns, promised.is_bound) == (60 * S, True)
    assert {(share.node_id, share.count) for share in promised.shares} == {("id-n1", 8), ("id-n2", 4)}


def test_F81_what_was_given_away_in_the_same_pass_is_promised_to_nobody() -> None:
    nodes: list[Any] = [
        busy(node("n1", H100=8), 4, "x/a", limit_s=1800.0),
        busy(node("n2", H100=8), 4, "x/b", limit_s=3600.0),
    ]
    queue = [
        wanted("r1", 8, owner="u1", limit_s=3600.0),
        wanted("r2", 4, owner="u2", limit_s=7200.0),
        wanted("r3", 8, owner="u3", limit_s=3600.0),
    ]
    decided = decide(queue, nodes)
    assert decided.placed() == {"r2": "n2"}
    before = {one.run_id: one.at_ns for one in decided.planner.reservations()}
    decided.planner.decide(2 * S)
    assert {one.run_id: one.at_ns for one in decided.planner.reservations()} == before


def test_a_gang_is_not_promised_a_node_that_changes_hands_before_it_would_be_over() -> None:
    theirs = msgspec.structs.replace(node("n2", H100=8), owner="ann", turns_ns=5400 * S)
    nodes: list[Any] = [busy(node("n1", H100=8), 8, limit_s=3600.0), theirs]
    queue = [gang("r1", 16, owner="bob", limit_s=3600.0)]
    assert decide(queue, nodes).planner.reservations() == ()
    theirs = msgspec.structs.replace(theirs, turns_ns=7300 * S)
    (promised,) = decide(queue, [nodes[0], theirs]).planner.reservations()
    assert promised.at_ns == 3600 * S


def test_several_nodes_are_cleared_together_or_none_and_who_has_several_leaves_once() -> None:
    lower: dict[str, Any] = {"priority": BEST_EFFORT, "preemptible": True}
    n1, n2, n3 = (node(name, H100=8) for name in ("n1", "n2", "n3"))
    both = RunningRun(
        wanted=gang("be", 16, title="bob/be", **lower),
        shares=(
            DeviceShare(node_id=n1.id, gpu_type="H100", count=8),
            DeviceShare(node_id=n2.id, gpu_type="H100", count=8),
        ),
        since_ns=0,
    )
    made = planner([(n1, both), n2, busy(n3, 8, "bob/stays")], [gang("r1", 12), gang("r2", 24, owner="zoe")])
    decided = Decided(made, 700 * S)
    assert [(one.run_id, one.for_run) for one in decided.decision.preemptions] == [("be", "r1")]
    assert decided.wait("r1").reason is WaitReason.MAKING_ROOM
    assert golden("model.several_nodes.bob-asked-give") in decided.said("r1")
    alone = planner([(n1, both), n2, busy(n3, 8, "bob/stays")], [gang("r2", 24)])
    assert alone.decide(700 * S).preemptions == ()


def test_a_pool_gets_back_a_node_of_a_gang_that_borrows_several() -> None:
    pool = Pool(name="search", reserved=True, lends=True, return_s=300.0)
    world = World([msgspec.structs.replace(node(name, H100=8), pool="search") for name in ("n1", "n2")])
    world.tell(PoolSeen(pool))
    world.submit(gang("be", 16, owner="bob", priority=BEST_EFFORT, preemptible=True), 5_000)
    world.submit(wanted("own", 4, pool="search"), 1_000, at_s=50)
    world.run(100)
    assert [one.run_id for one in world.preemptions] == ["be"]
    assert world.started_ns["own"] == 60 * S
    world.run(50_000)
    assert not world.running and not world.waiting


def test_nodes_that_did_not_reach_each_other_are_not_put_together_again() -> None:
    nodes = [node(name, H100=8) for name in ("n1", "n2", "n3")]
    apart = gang("r1", 16, apart=frozenset({("id-n2", "id-n1")}))
    assert sorted(having(decide([apart], nodes), "r1")) in ([("n1", 8), ("n3", 8)], [("n2", 8), ("n3", 8)])
    assert having(decide([apart], nodes[:2]), "r1") == [("n1", 8), ("n2", 8)]
    failed = gang("r1", 16, avoid=frozenset({"id-n1"}))
    assert having(decide([failed], nodes), "r1") == [("n2", 8), ("n3", 8)]


# --- whatever comes ---------------------------------------------------------------------------------------------------

_FLEET = st.lists(
    st.tuples(st.sampled_from(["", "a"]), st.sampled_from([1, 2, 4, 6, 8]), st.integers(0, 8), st.booleans()),
    min_size=1,
    max_size=7,
)


@settings(deadline=None, max_examples=200)
@given(_FLEET, st.integers(1, 40))
def test_whatever_there_is_a_gang_is_whole_of_one_pool_on_the_fewest_nodes_that_are_free(
    fleet: list[tuple[str, int, int, bool]], gpus: int
) -> None:
    nodes: list[Any] = []
    free: dict[str, tuple[str, int, int, bool]] = {}
    for number, (pool, size, taken, crews) in enumerate(fleet):
        place = msgspec.structs.replace(node(f"n{number}", H100=size), pool=pool, crews=crews)
        taken = min(taken, size)
        nodes.append(busy(place, taken, "x/y") if taken else place)
        free[f"n{number}"] = (pool, size, size - taken, crews)
    given = having(decide([gang("r1", gpus)], nodes), "r1")
    largest = max(size for _, size, _, _ in free.values())
    if gpus <= largest:
        assert len(given) == any(there >= gpus for _, _, there, _ in free.values())
        return
    fewest = [
        least
        for each in ("", "a")
        if (least := _fewest([entry[1:3] for entry in free.values() if entry[0] == each and entry[3]], gpus))
    ]
    assert len(given) == min(fewest, default=0)
    if given:
        assert sum(count for _, count in given) == gpus
        assert len({free[name][0] for name, _ in given}) == 1
        assert all(free[name][3] and count <= free[name][2] for name, count in given)
        assert sum(count < free[name][1] for name, count in given) <= 1  # whole nodes, and one part


def _fewest(nodes: list[tuple[int, int]], gpus: int) -> int | None:
    """Return on how many nodes a gang has room as whole ones and a part, of nodes with sizes and what is free."""
    found = []
    for part, (_, most) in enumerate([(0, 0), *nodes]):
        rest = [size for at, (size, there) in enumerate(nodes, 1) if at != part and size == there]
        for number in range(len(rest) + 1):
            whole = sum(sorted(rest, reverse=True)[:number])
            if whole <= gpus <= whole + most and (most == 0) == (whole == gpus):
                found.append(number + (most > 0))
            elif whole > gpus - 1 and most > 0:
                found.append(number + (0 if whole == gpus else 99))
    return min((one for one in found if one < 99), default=None)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([2, 4, 8]), min_size=2, max_size=5),
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 3000), st.integers(0, 3000), st.booleans()),
        min_size=1,
        max_size=16,
    ),
)
def test_F81_no_gang_starves_and_a_latest_time_that_was_told_holds(
    sizes: list[int], runs: list[tuple[int, int, int, bool]]
) -> None:
    world = World([node(f"n{number}", H100=size) for number, size in enumerate(sizes)], QueuePolicy())
    for number, (gpus, length_s, at_s, declares) in enumerate(runs):
        limit = float(length_s) if declares else None
        world.submit(gang(f"r{number}", gpus, owner=f"u{number % 3}", limit_s=limit), length_s, at_s=at_s)
    told: dict[str, int] = {}

    def check() -> None:
        held = Counter[str]()
        for running in world.running.values():
            for share in running.shares:
                held[share.node_id] += share.count
        assert all(held[each.id] <= each.total["H100"] for each in world.nodes.values())
        for run_id, at_ns in told.items():
            assert run_id not in world.waiting or world.now_ns <= at_ns + 60 * S, run_id
        for one in world.planner.reservations():
            if one.is_bound and one.at_ns is not None and one.run_id in world.waiting:
                assert one.at_ns <= told.get(one.run_id, one.at_ns) + 60 * S
                told[one.run_id] = one.at_ns

    world.on_decision = check
    world.run(400_000)
    assert not world.running
    for run_id in world.waiting:
        never = world.planner.why(run_id, world.now_ns)
        assert never is not None and never.reason is WaitReason.UNSATISFIABLE, never
