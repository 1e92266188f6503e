"""Who is placed, and what the others are told."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from serverless_gpu.model.hardware import census, cpu_slots, parse_fake
from serverless_gpu.model.queueing import (
    Decision,
    Holding,
    Node,
    Placement,
    Wanted,
    decide,
    impossible,
    ordinal,
)


def node(name: str, **devices: int) -> Node:
    """Return a node with these devices."""
    return Node(id=f"id-{name}", name=name, pool="default", machine=f"machine-{name}", total=devices)


def wanted(run_id: str, gpus: int | None = 1, gpu_type: str | None = "H100", **others: object) -> Wanted:
    """Return a run that has waited for as long as its number is small."""
    age = int("".join(letter for letter in run_id if letter.isdigit()) or 0)
    base = Wanted(run_id=run_id, title=f"alice/{run_id}", priority=1, queued_ns=age, gpus=gpus, gpu_type=gpu_type)
    return msgspec.structs.replace(base, **others)


def busy(place: Node, count: int, title: str = "alice/bert-ft", gpu_type: str = "H100") -> Node:
    """Return the node with some devices taken."""
    return msgspec.structs.replace(
        place, holdings=(*place.holdings, Holding(title=title, gpu_type=gpu_type, count=count))
    )


def placed(decision: Decision) -> dict[str, str]:
    """Return node by run."""
    return {placement.run_id: placement.node_id for placement in decision.placements}


def said(decision: Decision, run_id: str) -> str:
    """Return the sentence of a run."""
    return decision.waiting[run_id].sentence


def test_a_gang_is_placed_whole_on_one_node() -> None:
    decision = decide([wanted("r1", 4)], [node("n1", H100=2), node("n2", H100=4)])
    assert decision == Decision(
        placements=(Placement(run_id="r1", node_id="id-n2", gpu_type="H100", count=4),), waiting={}
    )


def test_the_class_comes_before_the_age_and_the_age_before_everything_else() -> None:
    queue = [wanted("r3"), wanted("r1", priority=2), wanted("r2")]
    decision = decide(queue, [node("n1", H100=2)])
    assert list(placed(decision)) == ["r2", "r3"]
    assert said(decision, "r1").endswith("you are 1st")


def test_F58_a_run_goes_where_its_version_of_python_is_or_to_the_callers_own_machine() -> None:
    old = msgspec.structs.replace(node("n1", H100=1), pythons=("3.11",))
    new = msgspec.structs.replace(node("n2", H100=1), pythons=("3.11", "3.12"))
    silent = node("n3", H100=1)
    queue = [wanted("r1", python="3.12"), wanted("r2", python="3.12"), wanted("r3", python="3.11")]
    decision = decide(queue, [old, new])
    assert placed(decision) == {"r1": "id-n2", "r3": "id-n1"}
    assert said(decision, "r2") == "needs 1 H100; none free on n2; alice/r1 has 1 of it; you are 1st"
    assert placed(decide(queue[:1], [old, silent])) == {"r1": "id-n3"}
    mine = wanted("r1", python="3.12", caller="machine-n1")
    assert placed(decide([mine], [old])) == {"r1": "id-n1"}
    assert placed(decide([wanted("r1")], [old])) == {"r1": "id-n1"}


def test_who_is_left_alone_for_a_while_waits_beside_the_line_and_keeps_nothing() -> None:
    held = wanted("r1", 8, not_before_ns=10, held="it is tried again at 12:00:05")
    queue, nodes = [held, wanted("r2"), wanted("r3", 8)], [node("n1", H100=8)]
    decision = decide(queue, nodes, now_ns=9)
    assert list(placed(decision)) == ["r2"]
    assert said(decision, "r1") == "it is tried again at 12:00:05"
    assert said(decision, "r3").endswith("you are 1st")
    assert list(placed(decide(queue, nodes, now_ns=10))) == ["r1"]


def test_the_node_with_the_least_left_over_is_taken_so_that_large_gangs_find_whole_ones() -> None:
    queue = [wanted("r1", 2), wanted("r2", 8)]
    decision = decide(queue, [node("n1", H100=8), busy(node("n2", H100=8), 5)])
    assert placed(decision) == {"r1": "id-n2", "r2": "id-n1"}


def test_who_waits_is_told_what_is_missing_where_and_who_has_it() -> None:
    queue = [wanted("r1", 8), wanted("r2", 8)]
    decision = decide(queue, [busy(node("n3", H100=8), 3)])
    assert said(decision, "r1") == ("needs 8 H100 on one node; 5 free on n3; alice/bert-ft has 3 of it; you are 1st")
    assert said(decision, "r2") == (
        "needs 8 H100 on one node; 5 free on n3, kept for alice/r1, which is ahead; alice/bert-ft has 3 of it;"
        " you are 2nd"
    )


def test_the_sentence_counts_what_was_placed_in_the_same_pass() -> None:
    decision = decide([wanted("r1", 6), wanted("r2", 4)], [node("n1", H100=8)])
    assert said(decision, "r2") == "needs 4 H100 on one node; 2 free on n1; alice/r1 has 6 of it; you are 1st"


def test_many_holders_are_counted_after_the_first_three() -> None:
    place = node("n1", H100=8)
    for number in range(5):
        place = busy(place, 1, f"bob/{number}")
    place = busy(place, 3, "bob/big")
    sentence = said(decide([wanted("r1")], [place]), "r1")
    assert sentence == (
        "needs 1 H100; none free on n1; bob/big has 3 of it; bob/0 has 1 of it; bob/1 has 1 of it; 3 more; you are 1st"
    )


def test_devices_that_others_use_are_not_given_and_are_named() -> None:
    place = msgspec.structs.replace(node("n1", H100=4), outside={"H100": 2})
    decision = decide([wanted("r1", 4)], [place])
    assert said(decision, "r1") == (
        "needs 4 H100 on one node; 2 free on n1; 2 of it used by others than this server, or in quarantine; you are 1st"
    )
    assert placed(decide([wanted("r1", 2)], [place])) == {"r1": "id-n1"}


def test_a_blocked_gang_keeps_one_node_and_the_rest_may_be_used() -> None:
    nodes = [busy(node("n1", H100=8), 3), busy(node("n2", H100=8), 6)]
    decision = decide([wanted("r1", 8), wanted("r2", 2), wanted("r3", 1)], nodes)
    assert placed(decision) == {"r2": "id-n2"}
    assert "kept for alice/r1" not in said(decision, "r1")
    assert said(decision, "r3").startswith("needs 1 H100; none free on n2; ")


def test_only_devices_of_the_type_that_is_waited_for_are_kept() -> None:
    place = busy(node("n1", H100=8, CPU=16), 1)
    decision = decide([wanted("r1", 8), wanted("r2", 16, "CPU")], [place])
    assert placed(decision) == {"r2": "id-n1"}


def test_one_gang_of_a_kind_keeps_a_node_not_every_gang() -> None:
    nodes = [busy(node("n1", H100=8), 3), busy(node("n2", H100=8), 4)]
    decision = decide([wanted("r1", 8), wanted("r2", 8), wanted("r3", 4)], nodes)
    assert placed(decision) == {"r3": "id-n2"}


def test_a_gang_that_can_never_be_placed_keeps_nothing_and_takes_no_place_in_the_row() -> None:
    decision = decide([wanted("r1", 64), wanted("r2", 8), wanted("r3", 1)], [busy(node("n1", H100=8), 1)])
    assert decision.waiting["r1"].impossible
    assert placed(decision) == {}
    assert said(decision, "r2").endswith("you are 1st")
    assert "kept for alice/r2" in said(decision, "r3")


def test_a_gang_ahead_is_not_bound_by_what_one_behind_keeps() -> None:
    queue = [wanted("r1", 8), wanted("r2", 2, priority=0)]
    assert placed(decide(queue, [busy(node("n1", H100=8), 3)])) == {"r2": "id-n1"}


def test_a_blocked_large_gang_is_served_once_those_before_it_have_ended() -> None:
    held = 8
    queue = [wanted("r1", 8), *(wanted(f"r{number}", 1) for number in range(2, 20))]
    for held in range(8, 0, -1):
        assert placed(decide(queue, [busy(node("n1", H100=8), held)])) == {}
    assert placed(decide(queue, [node("n1", H100=8)])) == {"r1": "id-n1"}


def test_a_node_that_failed_to_start_a_run_is_used_for_it_last() -> None:
    again = wanted("r1", avoid=frozenset({"id-n1"}))
    assert placed(decide([again], [node("n1", H100=1), node("n2", H100=8)])) == {"r1": "id-n2"}
    assert placed(decide([again], [node("n1", H100=1)])) == {"r1": "id-n1"}


def test_all_of_a_node_means_all_of_the_one_it_is_placed_on() -> None:
    nodes = [busy(node("n1", H100=8), 1), node("n2", H100=4)]
    decision = decide([wanted("r1", None)], nodes)
    assert decision.placements == (Placement(run_id="r1", node_id="id-n2", gpu_type="H100", count=4),)
    waiting = decide([wanted("r1", None)], [nodes[0]])
    assert said(waiting, "r1") == (
        "needs every H100 of a node (8); 7 free on n1; alice/bert-ft has 1 of it; you are 1st"
    )


def test_without_a_type_the_only_gpu_type_there_is_is_meant() -> None:
    assert placed(decide([wanted("r1", 1, None)], [node("n1", CPU=8), node("n2", A10=1)])) == {"r1": "id-n2"}


def test_a_family_is_placed_on_devices_of_one_member() -> None:
    mixed = Node(id="id-n1", name="n1", total={"A100-40": 2, "A100-80": 4})
    decision = decide([wanted("r1", 4, "A100")], [mixed])
    assert decision.placements == (Placement(run_id="r1", node_id="id-n1", gpu_type="A100-80", count=4),)
    assert decide([wanted("r1", 6, "A100")], [mixed]).waiting["r1"].impossible


def test_a_reserved_pool_has_to_be_named() -> None:
    reserved = Node(id="id-n1", name="n1", pool="research", reserved=True, total={"H100": 8})
    assert placed(decide([wanted("r1", pool="research")], [reserved])) == {"r1": "id-n1"}
    assert said(decide([wanted("r1")], [reserved]), "r1") == (
        "every node is in a reserved pool, which has to be named: research"
    )


def test_files_that_stay_where_they_are_need_that_machine() -> None:
    nodes = [node("n1", H100=8), node("n2", H100=8)]
    assert placed(decide([wanted("r1", machine="machine-n2")], nodes)) == {"r1": "id-n2"}
    assert 'env="snapshot" takes them along' in impossible(wanted("r1", machine="other"), nodes)


def test_a_node_that_is_away_is_not_used_and_said_to_be_away() -> None:
    away = msgspec.structs.replace(node("n1", H100=8), away="has been silent since 12:03:05")
    assert said(decide([wanted("r1", 8)], [away]), "r1") == (
        "needs 8 H100 on one node; n1 has been silent since 12:03:05; you are 1st"
    )


@pytest.mark.parametrize(
    ("run", "nodes", "sentence"),
    [
        (wanted("r1"), [], "no node has joined this server yet"),
        (wanted("r1", pool="x"), [node("n1", H100=1)], "pool 'x' has no nodes; pools that have: default"),
        (wanted("r1"), [node("n1", A10=4), node("n2", A10=2)], "no node has H100; there is 6 A10"),
        (wanted("r1"), [node("n1", CPU=4)], "no node has H100; there is no GPU"),
        (wanted("r1", 1, None), [node("n1", CPU=4)], 'no node has a GPU; gpu_type="CPU" runs on CPU slots'),
        (
            wanted("r1", 1, None),
            [node("n1", A10=4), node("n2", H100=2)],
            "there are several GPU types (A10, H100), and gpu_type does not say which",
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
            wanted("r1", platform="linux-aarch64"),
            [Node(id="a", name="n1", platform="linux-x86_64", total={"H100": 1})],
            "made on linux-aarch64, and the nodes are linux-x86_64",
        ),
        (
            wanted("r1", platform="linux-x86_64", pool="a"),
            [
                Node(id="a", name="n1", pool="a", platform="linux-aarch64", total={"H100": 1}),
                Node(id="b", name="n2", pool="b", platform="linux-x86_64", total={"H100": 1}),
            ],
            "no node of pool 'a' is what it needs (linux-x86_64)",
        ),
        (
            wanted("r1", python="3.12", caller="elsewhere"),
            [
                Node(id="a", name="n1", pythons=("3.9", "3.11"), total={"H100": 1}),
                Node(id="b", name="n2", pythons=("3.10",), total={"H100": 1}),
                Node(id="c", name="n3", pool="c", reserved=True, pythons=("3.12",), total={"H100": 1}),
            ],
            "needs Python 3.12, and the nodes have 3.9, 3.10, 3.11; `uv python install` adds one",
        ),
    ],
)
def test_what_can_never_be_is_said_at_once(run: Wanted, nodes: list[Node], sentence: str) -> None:
    assert impossible(run, nodes) == sentence
    assert said(decide([run], nodes), "r1") == sentence


def test_fakes_are_there_instead_of_the_real_ones() -> None:
    assert census((*parse_fake("CPU:4,H100:2"), *cpu_slots(16))) == ({"CPU": 4, "H100": 2}, {})
    assert census(parse_fake("H100:2"), ["FAKE-H100-1", "gone"]) == ({"H100": 2}, {"H100": 1})


def test_ordinals() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 22, 101, 111)
    said_so = ", ".join(ordinal(number) for number in numbers)
    assert said_so == "1st, 2nd, 3rd, 4th, 11th, 12th, 13th, 21st, 22nd, 101st, 111th"


_TYPES = st.sampled_from(["H100", "A10", None])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 4, 8, None]), _TYPES), max_size=12),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4), st.integers(0, 8), st.booleans()), max_size=4),
)
def test_whatever_is_asked_nothing_is_given_twice_and_everybody_gets_an_answer(
    asked: Sequence[tuple[int, int | None, str | None]], have: Sequence[tuple[int, int, int, bool]]
) -> None:
    queue = [
        wanted(f"r{number}", gpus, gpu_type, priority=priority)
        for number, (priority, gpus, gpu_type) in enumerate(asked)
    ]
    nodes = [
        msgspec.structs.replace(busy(node(f"n{number}", H100=h100, A10=a10), held), away="is away" if away else "")
        for number, (h100, a10, held, away) in enumerate(have)
    ]
    decision = decide(queue, nodes)
    assert sorted([*placed(decision), *decision.waiting]) == sorted(run.run_id for run in queue)
    assert all(wait.sentence for wait in decision.waiting.values())
    by_id = {place.id: place for place in nodes}
    for place in nodes:
        for gpu_type, total in place.total.items():
            given_now = sum(
                placement.count
                for placement in decision.placements
                if (placement.node_id, placement.gpu_type) == (place.id, gpu_type)
            )
            held = sum(holding.count for holding in place.holdings if holding.gpu_type == gpu_type)
            assert given_now <= max(0, total - held)
    assert not any(by_id[node_id].away for node_id in placed(decision).values())
    # A second pass with the placements in place finds nothing more to give: nothing that fits is left waiting for no
    # reason, and nothing is placed twice.
    after = [
        msgspec.structs.replace(
            place,
            holdings=(
                *place.holdings,
                *(
                    Holding(title="x", gpu_type=placement.gpu_type, count=placement.count)
                    for placement in decision.placements
                    if placement.node_id == place.id
                ),
            ),
        )
        for place in nodes
    ]
    left = [run for run in queue if run.run_id in decision.waiting]
    assert decide(left, after).placements == ()
