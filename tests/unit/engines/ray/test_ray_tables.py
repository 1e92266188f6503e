"""What Ray's tables mean, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from serverless_gpu.engines.base import EngineNode, Gang, Impossible, NodeLost, NodeUp, Share, Waiting
from serverless_gpu.engines.ray import ray_tables
from serverless_gpu.engines.ray.ray_tables import MISSING_NS, GroupState, KnownNode, NodeRow, PlacementGroup, Scheduling

FOUR = {"CPU": 2.0, "GPU": 4.0, "sgpu_gpus:H100": 4.0, "sgpu_node:n1": 1.0, "memory": 1e9}


def raw(node: str = "a", resources: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    """Return a row of `ray.nodes()`, as Ray 2.60 has them."""
    offered = FOUR if resources is None else resources
    return {
        "NodeID": node,
        "Alive": True,
        "NodeManagerAddress": "10.0.0.2",
        "DeathReason": 0,
        "DeathReasonMessage": "",
        "Resources": offered,
        "Labels": {"ray.io/node-id": node},
        **more,
    }


def known(**lost: str) -> dict[str, KnownNode]:
    """Return nodes with what Ray says of each: four H100, or why it is lost."""
    return {
        name: KnownNode(
            row=NodeRow(id=f"id-{name}", name=name, alive=not why, counts={"H100": 4}, declares=True, gpus=4), lost=why
        )
        for name, why in lost.items()
    }


def gang(*shares: tuple[str, str, int]) -> Gang:
    """Return a gang of shares: node, type, count."""
    return Gang(id="r:1", shares=tuple(Share(node=node, gpu_type=kind, count=count) for node, kind, count in shares))


@pytest.mark.parametrize(
    ("resources", "counts", "declares"),
    [
        (FOUR, {"H100": 4}, True),
        ({"GPU": 4.0, "accelerator_type:A10": 1.0, "sgpu_node:n1": 1.0}, {"A10": 4}, False),
        ({"GPU": 4.0, "sgpu_node:n1": 1.0}, {}, False),
        ({"GPU": 4.0, "accelerator_type:A10": 1.0, "accelerator_type:T4": 1.0, "sgpu_node:n1": 1.0}, {}, False),
        ({"GPU": 3.0, "sgpu_gpus:A10": 2.0, "sgpu_gpus:T4": 1.0, "sgpu_node:n1": 1.0}, {"A10": 2, "T4": 1}, True),
        ({"CPU": 8.0, "sgpu_gpus:CPU": 8.0, "sgpu_node:n1": 1.0}, {"CPU": 8}, True),
    ],
)
def test_a_node_says_what_it_offers(resources: dict[str, float], counts: dict[str, int], declares: bool) -> None:
    row = ray_tables.row(raw(resources=resources))
    assert row is not None
    assert (row.name, row.counts, row.declares, row.alive) == ("n1", counts, declares, True)


@pytest.mark.parametrize(
    "one",
    [
        raw(resources={"CPU": 2.0}),
        raw(resources={"sgpu_node:n1": 1.0, "sgpu_node:n2": 1.0}),
        {"Alive": True, "Resources": FOUR},
        {"NodeID": "a", "Alive": True, "Resources": None},
        {},
    ],
)
def test_what_is_no_node_of_ours_is_none(one: dict[str, Any]) -> None:
    assert ray_tables.row(one) is None


def test_a_node_has_the_endpoints_of_rays_processes() -> None:
    row = ray_tables.row(
        raw(NodeManagerPort=7901, ObjectManagerPort=7902, MetricsExportPort=0, RuntimeEnvAgentPort=None)
    )
    assert row is not None
    assert ray_tables.engine_node(row).endpoints == ("10.0.0.2:7901", "10.0.0.2:7902")
    other = ray_tables.row(raw(NodeManagerPort=7901, NodeManagerAddress="fd00::2"))
    assert other is not None
    assert ray_tables.engine_node(other).endpoints == ("[fd00::2]:7901",)


def test_only_true_is_alive() -> None:
    for said in ("yes", 1, None, "true"):
        row = ray_tables.row(raw(Alive=said))
        assert row is not None and not row.alive


def test_a_node_comes_is_lost_when_ray_says_so_and_comes_again_as_another_row() -> None:
    there = ray_tables.update_nodes({}, [raw()], 0)
    assert ray_tables.node_changes({}, there) == [NodeUp(node=EngineNode(name="n1"))]
    dead = raw(resources={}, Alive=False, DeathReasonMessage="missing too many\n  heartbeats \x07")
    lost = ray_tables.update_nodes(there, [dead], 1)
    sentence = "is lost: Ray reports the node as dead (missing too many heartbeats ?)"
    assert ray_tables.node_changes({"n1": ""}, lost) == [NodeLost(node="n1", sentence=sentence)]
    assert ray_tables.node_changes({"n1": sentence}, ray_tables.update_nodes(lost, [dead], 2)) == []
    back = ray_tables.update_nodes(lost, [dead, raw("b")], 3)
    assert ray_tables.node_changes({"n1": sentence}, back) == [NodeUp(node=EngineNode(name="n1"))]
    assert back["n1"].row.id == "b"


def test_ray_started_again_before_it_missed_the_old_one_is_no_loss() -> None:
    there = ray_tables.update_nodes({}, [raw("a")], 0)
    for table in ([raw("a"), raw("b")], [raw("b"), raw("a")]):
        both = ray_tables.update_nodes(there, table, 1)
        assert both["n1"].row.id == "b"
        dead = raw("a", resources={}, Alive=False)
        after = ray_tables.update_nodes(both, [dead, raw("b")], 2)
        assert ray_tables.node_changes({"n1": ""}, after) == []


def test_a_node_that_is_missing_from_the_table_is_lost_after_a_while_only() -> None:
    there = ray_tables.update_nodes({}, [raw()], 0)
    missing = ray_tables.update_nodes(there, [], 5)
    assert ray_tables.node_changes({"n1": ""}, missing) == []
    assert ray_tables.refusal(gang(("n1", "H100", 1)), missing) == Waiting(sentence="n1 has not rejoined the Ray head")
    still = ray_tables.update_nodes(missing, [], 4 + MISSING_NS)
    assert ray_tables.node_changes({"n1": ""}, still) == []
    lost = ray_tables.update_nodes(still, [], 5 + MISSING_NS)
    assert ray_tables.node_changes({"n1": ""}, lost) == [
        NodeLost(node="n1", sentence="is lost: the node has been missing from Ray's node table for 120 s")
    ]
    assert ray_tables.update_nodes(missing, [raw("b")], 6)["n1"] == KnownNode(row=ray_tables.rows([raw("b")])[0])


def test_a_node_that_never_was_up_is_not_lost() -> None:
    assert ray_tables.node_changes({}, known(n1="has no agent")) == []
    assert ray_tables.node_changes({"n1": "has no agent"}, known(n1="")) == [NodeUp(node=EngineNode(name="n1"))]


@pytest.mark.parametrize(
    ("shares", "offered", "bundles"),
    [
        (
            [("n1", "H100", 2)],
            FOUR,
            [{"GPU": 2.0, "sgpu_gpus:H100": 2.0, "sgpu_node:n1": 0.001}],
        ),
        (
            [("n1", "CPU", 3)],
            {"CPU": 4.0, "sgpu_gpus:CPU": 4.0, "sgpu_node:n1": 1.0},
            [{"CPU": 3.0, "sgpu_gpus:CPU": 3.0, "sgpu_node:n1": 0.001}],
        ),
        (
            [("n1", "H100", 2)],
            {"sgpu_gpus:H100": 4.0, "sgpu_node:n1": 1.0},
            [{"sgpu_gpus:H100": 2.0, "sgpu_node:n1": 0.001}],
        ),
        ([("n1", "H100", 2)], {"GPU": 4.0, "sgpu_node:n1": 1.0}, [{"GPU": 2.0, "sgpu_node:n1": 0.001}]),
    ],
)
def test_a_share_is_a_bundle_that_can_be_on_its_node_only(
    shares: list[tuple[str, str, int]], offered: dict[str, float], bundles: list[dict[str, float]]
) -> None:
    assert ray_tables.bundles(gang(*shares), ray_tables.update_nodes({}, [raw(resources=offered)], 0)) == bundles


def test_bundles_are_in_the_order_of_shares() -> None:
    table = [raw(name, {**FOUR, f"sgpu_node:{name}": 1.0}) for name in ("n2", "n3")]
    for one in table:
        del one["Resources"]["sgpu_node:n1"]
    made = ray_tables.bundles(gang(("n3", "H100", 1), ("n2", "H100", 4)), ray_tables.update_nodes({}, table, 0))
    assert [("sgpu_node:n3" in bundle, bundle["GPU"]) for bundle in made] == [(True, 1.0), (False, 4.0)]


@pytest.mark.parametrize(
    ("shares", "answer"),
    [
        ([("n1", "H100", 4), ("n2", "H100", 1)], None),
        ([("n9", "H100", 1)], Impossible(sentence="the Ray cluster has no node 'n9'")),
        ([("n1", "H100", 5)], Impossible(sentence="n1 has 4 H100, not 5")),
        ([("n1", "A10", 1)], Impossible(sentence="n1 has 0 A10, not 1")),
        ([("n3", "H100", 1)], Waiting(sentence="n3 is lost")),
        ([("n3", "H100", 1), ("n1", "H100", 5)], Impossible(sentence="n1 has 4 H100, not 5")),
    ],
)
def test_ray_need_not_be_asked(shares: list[tuple[str, str, int]], answer: Waiting | Impossible | None) -> None:
    assert ray_tables.refusal(gang(*shares), known(n1="", n2="", n3="is lost")) == answer


def refusal_by_ray(scheduling: str, state: str = "PENDING", **free: float) -> Waiting | Impossible:
    """Return what follows when Ray did not reserve three H100 on n1, of which so many are free."""
    said = ray_tables.group("r:1", {"state": state, "stats": {"scheduling_state": scheduling}})
    there = {"id-n1": {"GPU": 4.0, "sgpu_gpus:H100": free.get("h100", 4.0), "sgpu_node:n1": 1.0}}
    return ray_tables.placement_refusal(gang(("n1", "H100", 3)), said, known(n1=""), there)


def test_what_ray_refuses_is_a_sentence() -> None:
    assert refusal_by_ray("NO_RESOURCES", h100=1.0) == Waiting(sentence="Ray reports 1 of 3 H100 free on n1")
    assert refusal_by_ray("NO_RESOURCES") == Waiting(sentence="Ray is still reserving r:1")
    assert refusal_by_ray("INFEASIBLE") == Impossible(
        sentence="Ray reports that its cluster can never provide 3 H100 on n1"
    )
    assert refusal_by_ray("QUEUED") == Waiting(sentence="Ray is still reserving r:1")
    assert refusal_by_ray("AWAITING_BLESSING") == Waiting(sentence="Ray reports the state 'AWAITING_BLESSING' for r:1")
    assert refusal_by_ray("QUEUED", "IN_LIMBO") == Waiting(sentence="Ray reports the state 'QUEUED' for r:1")


def test_what_is_infeasible_because_a_node_was_lost_meanwhile_waits() -> None:
    said = PlacementGroup(gang="r:1", state=GroupState.PENDING, scheduling=Scheduling.INFEASIBLE)
    answer = ray_tables.placement_refusal(gang(("n1", "H100", 3)), said, known(n1="is lost: Ray says so"), {})
    assert answer == Waiting(sentence="n1 is lost: Ray says so")


def test_groups_are_ours_by_their_name_and_not_removed() -> None:
    table: list[dict[str, object]] = [
        {"name": "sgpu:p:r:1", "state": "CREATED", "stats": {"scheduling_state": "FINISHED"}},
        {"name": "sgpu:p:r:2", "state": "REMOVED", "stats": {"scheduling_state": "REMOVED"}},
        {"name": "sgpu:p:r:3", "state": "RESCHEDULING", "stats": {}},
        {"name": "sgpu:p:r:4", "state": "PENDING", "stats": {"scheduling_state": "QUEUED"}},
        {"name": "sgpu:p:r:5", "state": "SOMETHING", "stats": None},
        {"name": "sgpu:pp:r:6", "state": "CREATED"},
        {"name": "", "state": "CREATED"},
        {"state": "CREATED"},
    ]
    found = ray_tables.groups("p", table)
    assert {name: (one.state, one.is_reserved(), one.is_under_way()) for name, one in found.items()} == {
        "r:1": (GroupState.CREATED, True, False),
        "r:3": (GroupState.RESCHEDULING, True, False),
        "r:4": (GroupState.PENDING, False, True),
        "r:5": (GroupState.UNKNOWN, False, False),
    }


def test_text_of_rays_is_one_short_line() -> None:
    assert ray_tables.plain(None) == ""
    assert ray_tables.plain(" a\n\tb\x1b[31m ") == "a b?[31m"
    assert len(ray_tables.plain("x" * 10_000)) < 220
