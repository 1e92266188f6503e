"""Who is placed where, and what the others are told."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    CRITICAL,
    DeviceShare,
    Node,
    Placement,
    Pool,
    PoolSeen,
    QueuedRun,
    QueuePolicy,
    WaitReason,
)
from tests.support.golden import golden
from tests.support.model.asking import Decided, busy, decide, node, planner, wanted

NEAR = QueuePolicy(nearly=0.8)
"""A gang of a whole node is nearly there with one device missing."""


def test_a_gang_is_placed_whole_on_one_node() -> None:
    decided = decide([wanted("r1", 4)], [node("n1", H100=2), node("n2", H100=4)])
    share = DeviceShare(node_id="id-n2", gpu_type="H100", count=4)
    assert decided.decision.placements == (Placement(run_id="r1", shares=(share,)),)
    assert decided.planner.why("r1", 1000) is None


def test_the_class_comes_before_the_age_and_the_age_before_everything_else() -> None:
    queue = [wanted("r3"), wanted("r1", priority=BEST_EFFORT), wanted("r2")]
    decided = decide(queue, [node("n1", H100=2)])
    assert list(decided.placed()) == ["r2", "r3"]
    assert decided.said("r1").endswith("you are 1st")


def test_F58_a_run_goes_where_its_version_of_python_is_or_to_the_callers_own_machine() -> None:
    old = msgspec.structs.replace(node("n1", H100=1), pythons=("3.11",))
    new = msgspec.structs.replace(node("n2", H100=1), pythons=("3.11", "3.12"))
    silent = node("n3", H100=1)
    queue = [wanted("r1", python="3.12"), wanted("r2", python="3.12"), wanted("r3", python="3.11")]
    decided = decide(queue, [old, new])
    assert decided.placed() == {"r1": "n2", "r3": "n1"}
    assert decided.said("r2") == golden("model.planner.needs-h100-none")
    assert decide(queue[:1], [old, silent]).placed() == {"r1": "n3"}
    mine = wanted("r1", python="3.12", caller="machine-n1")
    assert decide([mine], [old]).placed() == {"r1": "n1"}
    assert decide([wanted("r1")], [old]).placed() == {"r1": "n1"}


def test_who_is_left_alone_for_a_while_waits_beside_the_line_and_keeps_nothing() -> None:
    held = wanted("r1", 8, not_before_ns=100, held="it is tried again at 12:00:05")
    made = planner([node("n1", H100=8)], [held, wanted("r2", priority=CRITICAL), wanted("r3", 8)])
    decided = Decided(made, 99)
    assert list(decided.placed()) == ["r2"]
    assert decided.decision.wake_ns == 100
    assert decided.said("r1") == golden("model.planner.tried-again-12")
    assert decided.said("r3").endswith("you are 1st")
    made = planner([node("n1", H100=8)], [held, wanted("r3", 8)])
    assert list(Decided(made, 100).placed()) == ["r1"]


def test_the_node_with_the_least_left_over_is_taken_so_that_large_gangs_find_whole_ones() -> None:
    queue = [wanted("r1", 2), wanted("r2", 8)]
    assert decide(queue, [node("n1", H100=8), busy(node("n2", H100=8), 5)]).placed() == {"r1": "n2", "r2": "n1"}


def test_who_waits_is_told_what_is_missing_where_and_who_has_it() -> None:
    decided = decide([wanted("r1", 8), wanted("r2", 8)], [busy(node("n3", H100=8), 3)])
    assert decided.said("r1") == golden("model.planner.needs-h100-one")
    assert decided.said("r2") == golden("model.planner.needs-h100-one-node")


def test_who_comes_later_is_told_for_whom_something_is_kept() -> None:
    decided = decide([wanted("r1", 8), wanted("r2", 8)], [busy(node("n3", H100=8), 1)], policy=NEAR)
    assert decided.said("r2") == golden("model.planner.needs-h100-one-node-2")
    assert decided.wait("r2").reason is WaitReason.RESERVED


def test_the_sentence_counts_what_was_placed_in_the_same_pass() -> None:
    decided = decide([wanted("r1", 6), wanted("r2", 4, queued_ns=999)], [node("n1", H100=8)])
    assert decided.said("r2") == golden("model.planner.needs-h100-one-node-3")


def test_many_holders_are_counted_after_the_first_three() -> None:
    place = node("n1", H100=8)
    nodes = [busy(place, 1, f"bob/{number}") for number in range(5)]
    decided = decide([wanted("r1")], [*nodes, busy(place, 3, "bob/big")])
    assert decided.said("r1") == golden("model.planner.needs-h100-none-free")


def test_devices_that_others_use_are_not_given_and_are_named() -> None:
    place = msgspec.structs.replace(node("n1", H100=4), outside={"H100": 2})
    assert decide([wanted("r1", 4)], [place]).said("r1") == golden("model.planner.needs-h100-one-node-4")
    assert decide([wanted("r1", 2)], [place]).placed() == {"r1": "n1"}


def test_a_gang_that_is_nearly_there_keeps_one_node_and_the_rest_may_be_used() -> None:
    nodes = [busy(node("n1", H100=8), 1), busy(node("n2", H100=8), 7)]
    decided = decide([wanted("r1", 8), wanted("r2", 1), wanted("r3", 1)], nodes, policy=NEAR)
    assert decided.placed() == {"r2": "n2"}
    assert "kept for" not in decided.said("r1")
    assert decided.said("r3").startswith("needs 1 H100; ")
    assert [reservation.run_id for reservation in decided.planner.reservations()] == ["r1"]


def test_only_devices_of_the_type_that_is_waited_for_are_kept() -> None:
    decided = decide([wanted("r1", 8), wanted("r2", 16, "CPU")], [busy(node("n1", H100=8, CPU=16), 1)], policy=NEAR)
    assert decided.placed() == {"r2": "n1"}


def test_one_gang_of_a_kind_keeps_a_node_not_every_gang() -> None:
    nodes = [busy(node("n1", H100=8), 1), busy(node("n2", H100=8), 1)]
    decided = decide([wanted("r1", 8), wanted("r2", 8), wanted("r3", 4)], nodes, policy=NEAR)
    assert decided.placed() == {"r3": "n2"}


def test_a_gang_that_can_never_be_placed_keeps_nothing_and_takes_no_place_in_the_row() -> None:
    decided = decide([wanted("r1", 64), wanted("r2", 8), wanted("r3", 1)], [busy(node("n1", H100=8), 1)], policy=NEAR)
    assert decided.wait("r1").reason is WaitReason.UNSATISFIABLE
    assert decided.placed() == {}
    assert decided.said("r2").endswith("you are 1st")
    assert "kept for alice/r2" in decided.said("r3")


def test_a_gang_ahead_is_not_bound_by_what_one_behind_keeps() -> None:
    queue = [wanted("r1", 8), wanted("r2", 1, priority=CRITICAL)]
    assert decide(queue, [busy(node("n1", H100=8), 1)], policy=NEAR).placed() == {"r2": "n1"}


def test_a_node_that_failed_to_start_a_run_is_used_for_it_last() -> None:
    again = wanted("r1", avoid=frozenset({"id-n1"}))
    assert decide([again], [node("n1", H100=1), node("n2", H100=8)]).placed() == {"r1": "n2"}
    assert decide([again], [node("n1", H100=1)]).placed() == {"r1": "n1"}


def test_all_of_a_node_means_all_of_the_one_it_is_placed_on() -> None:
    taken = busy(node("n1", H100=8), 1)
    decided = decide([wanted("r1", None)], [taken, node("n2", H100=4)])
    assert decided.decision.placements[0].shares == (DeviceShare(node_id="id-n2", gpu_type="H100", count=4),)
    assert decide([wanted("r1", None)], [taken]).said("r1") == golden("model.planner.needs-every-h100")


def test_without_a_type_the_only_gpu_type_there_is_is_meant() -> None:
    assert decide([wanted("r1", 1, None)], [node("n1", CPU=8), node("n2", A10=1)]).placed() == {"r1": "n2"}


def test_a_family_is_placed_on_devices_of_one_member() -> None:
    mixed = Node(id="id-n1", name="n1", total={"A100-40": 2, "A100-80": 4})
    decided = decide([wanted("r1", 4, "A100")], [mixed])
    assert decided.decision.placements[0].shares == (DeviceShare(node_id="id-n1", gpu_type="A100-80", count=4),)
    assert decide([wanted("r1", 6, "A100")], [mixed]).wait("r1").reason is WaitReason.UNSATISFIABLE


def test_files_that_stay_where_they_are_need_that_machine() -> None:
    nodes = [node("n1", H100=8), node("n2", H100=8)]
    assert decide([wanted("r1", machine="machine-n2")], nodes).placed() == {"r1": "n2"}
    assert golden("model.planner.env-snapshot-takes") in decide([wanted("r1", machine="other")], nodes).said("r1")


def test_a_node_that_is_away_is_not_used_and_said_to_be_away() -> None:
    away = msgspec.structs.replace(node("n1", H100=8), away="has been silent since 12:03:05")
    decided = decide([wanted("r1", 8)], [away])
    assert decided.said("r1") == golden("model.planner.needs-h100-one-node-5")


@pytest.mark.parametrize(
    ("run", "nodes", "sentence"),
    [
        (wanted("r1"), [], "no node has joined this server yet"),
        (wanted("r1", pool="x"), [node("n1", H100=1)], "pool 'x' has no nodes; pools with nodes: default"),
        (wanted("r1"), [node("n1", A10=4), node("n2", A10=2)], "no node has H100; the nodes have 6 A10"),
        (wanted("r1"), [node("n1", CPU=4)], "no node has H100; the nodes have no GPU"),
        (wanted("r1", 1, None), [node("n1", CPU=4)], 'no node has a GPU; gpu_type="CPU" runs on CPU slots'),
        (
            wanted("r1", 1, None),
            [node("n1", A10=4), node("n2", H100=2)],
            "there are several GPU types (A10, H100), and gpu_type does not select one",
        ),
        (
            wanted("r1", 16),
            [node("n1", H100=4), node("n2", H100=8)],
            "needs 16 H100 on one node, and the largest has 8 (n2)",
        ),
        (
            wanted("r1", 16, None, pool="default"),
            [node("n1", H100=4)],
            "needs 16 H100 on one node, and the largest in pool 'default' has 4 (n1)",
        ),
        (
            wanted("r1", 16, several_nodes=True),
            [node("n1", H100=4), node("n2", H100=8)],
            "needs 16 H100; all 2 nodes of pool 'default' have 12 together",
        ),
        (
            wanted("r1", platform="linux-aarch64"),
            [Node(id="a", name="n1", platform="linux-x86_64", total={"H100": 1})],
            "the run needs linux-aarch64, and the nodes are linux-x86_64",
        ),
        (
            wanted("r1", platform="linux-x86_64", pool="a"),
            [
                Node(id="a", name="n1", pool="a", platform="linux-aarch64", total={"H100": 1}),
                Node(id="b", name="n2", pool="b", platform="linux-x86_64", total={"H100": 1}),
            ],
            "no node of pool 'a' is suitable: the run needs linux-x86_64",
        ),
    ],
)
def test_F82_what_can_never_be_is_said_at_once(run: QueuedRun, nodes: list[Node], sentence: str) -> None:
    assert decide([run], nodes).said("r1") == sentence


def test_F82_who_is_not_let_into_a_reserved_pool_reads_who_is_and_who_is_lent_some() -> None:
    nodes = [msgspec.structs.replace(node("n1", H100=2), pool="gold"), msgspec.structs.replace(node("n2"), pool="lab")]
    made = planner(nodes, [wanted("r1"), wanted("r2", priority=BEST_EFFORT)])
    made.apply([PoolSeen(Pool(name="gold", reserved=True)), PoolSeen(Pool(name="lab", reserved=True))])
    decided = Decided(made)
    closed = "every node is in a reserved pool, which the run must name: gold, lab"
    assert [decided.said(run_id) for run_id in ("r1", "r2")] == [closed, closed]
    made.apply([PoolSeen(Pool(name="gold", reserved=True, lends=True))])
    lent = f"{closed}; runs of BEST_EFFORT with resume=True or a short timeout= may borrow devices of gold"
    assert [Decided(made).said(run_id) for run_id in ("r1", "r2")] == [lent, lent]


_WEEK_S = 7 * 86_400.0


def test_22D5_beside_a_bound_of_seven_days_it_is_told_when_it_likely_starts() -> None:
    known = busy(node("n3", H100=8), 3, limit_s=_WEEK_S, expected_s=600.0)
    gangs = [wanted("r1", 8, limit_s=_WEEK_S), wanted("r2", 8, limit_s=_WEEK_S, expected_s=60.0)]
    decided = decide(gangs, [known])
    wait = decided.wait("r1")
    assert (wait.at_ns, wait.is_bound, wait.likely_ns) == (round(_WEEK_S * 1e9), True, 600 * 10**9)
    (one,) = wait.holders
    assert (one.until_ns, one.is_bound, one.likely_ns) == (round(_WEEK_S * 1e9), True, 600 * 10**9)
    (kept,) = decided.planner.promises().values()
    assert kept.likely_ns is None  # what is kept over passes is the latest time
    # Of the gang ahead nothing is known, so that nobody can say more of the second.
    assert decided.wait("r2").likely_ns is None
    estimate = decided.planner.estimate(wanted("r9", 1, limit_s=60.0), 1000)
    assert estimate.at_ns == 1000
    plain = decide(gangs[:1], [busy(node("n3", H100=8), 3, limit_s=_WEEK_S)]).wait("r1")
    assert (plain.is_bound, plain.likely_ns) == (True, None)


def test_22D5_who_has_no_promise_is_told_the_likely_time_and_not_seven_days() -> None:
    known = busy(node("n3", H100=1), 1, limit_s=_WEEK_S, expected_s=600.0)
    wait = decide([wanted("r1", 1)], [known]).wait("r1")
    assert (wait.at_ns, wait.is_bound, wait.likely_ns) == (600 * 10**9, False, None)
    estimate = decide([], [known]).planner.estimate(wanted("r1", 1), 1000)
    assert (estimate.at_ns, estimate.is_bound) == (600 * 10**9, False)
    assert estimate.basis == golden("model.planner.declared-learned-ends")
