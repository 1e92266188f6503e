"""A pool that cannot keep principals apart runs the code of one; runs of others wait with the reason `isolation`."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.model.scheduling.values import Node, Pool, PoolSeen, QueuedRun, WaitReason
from serverless_gpu.model.scheduling.wait_messages import sharing_warnings
from tests.support.golden import golden
from tests.support.model.asking import node, planner, wanted

CLOSED, OPEN = Pool(name="default", single_principal=True), Pool(name="big")
SENTENCE = (
    "pool default runs the code of one principal only, because all runs there share one operating-system user. "
    "An administrator can give each principal a sandbox: `sgpu pool set default --isolation sandbox`. "
    "Where agents do not run as root, an administrator can share the user: `sgpu pool set default --isolation none`"
)


def of(pool: str, name: str, **devices: int) -> Node:
    return msgspec.structs.replace(node(name, **devices), pool=pool)


def second(run_id: str, gpus: int = 1, **options: object) -> QueuedRun:
    return msgspec.structs.replace(wanted(run_id, gpus), owner="bob", second_principal=True, **options)


def test_22A1_a_second_principal_waits_for_isolation_and_the_first_does_not() -> None:
    made = planner([of("default", "n1", H100=2)], [second("r1", 1), wanted("r2", 1)])
    made.apply([PoolSeen(CLOSED)])
    assert [one.run_id for one in made.decide(1000).placements] == ["r2"]
    wait = made.why("r1", 1000)
    assert wait is not None and (wait.reason, wait.words, wait.place) == (WaitReason.ISOLATION, SENTENCE, 0)
    assert made.impossible(second("r3")) == ""
    estimate = made.estimate(second("r3"), 1000)
    assert (estimate.at_ns, estimate.basis, estimate.impossible) == (None, SENTENCE, False)
    assert estimate.wait is not None and estimate.wait.reason is WaitReason.ISOLATION


def test_22A1_it_starts_once_that_is_accepted_and_what_runs_goes_on_when_it_is_taken_back() -> None:
    made = planner([of("default", "n1", H100=2)], [second("r1", 1)])
    made.apply([PoolSeen(CLOSED)])
    assert made.decide(1000).placements == ()
    made.apply([PoolSeen(Pool(name="default"))])
    assert [one.run_id for one in made.decide(1001).placements] == ["r1"]
    made.apply([PoolSeen(CLOSED)])
    decision = made.decide(1002)
    assert (decision.placements, decision.preemptions) == ((), ())


def test_22A1_an_open_pool_is_used_and_the_closed_one_is_not() -> None:
    nodes = [of("default", "n1", H100=2), of("big", "n2", H100=2)]
    made = planner(nodes, [second("r1", 2), second("r2", 2)])
    made.apply([PoolSeen(CLOSED), PoolSeen(OPEN)])
    (placement,) = made.decide(1000).placements
    assert [share.node_id for share in placement.shares] == ["id-n2"]
    (waiting,) = {"r1", "r2"} - {placement.run_id}
    wait = made.why(waiting, 1000)
    assert wait is not None and wait.reason is WaitReason.CAPACITY  # it waits for the pool that it may use
    named = made.estimate(second("r3", pool="default"), 1000)
    assert named.basis == SENTENCE


def test_22A1_a_gang_over_nodes_waits_as_well_and_what_can_never_be_is_still_said() -> None:
    nodes = [of("default", "n1", H100=2), of("default", "n2", H100=2)]
    made = planner(nodes, [second("r1", 4, several_nodes=True), second("r2", 64)])
    made.apply([PoolSeen(CLOSED)])
    assert made.decide(1000).placements == ()
    reasons = {run_id: made.why(run_id, 1000) for run_id in ("r1", "r2")}
    assert [wait.reason for wait in reasons.values() if wait is not None] == [
        WaitReason.ISOLATION,
        WaitReason.UNSATISFIABLE,
    ]


def test_22A1_a_type_that_only_a_closed_pool_has_does_not_confuse_a_run_that_names_none() -> None:
    made = planner([of("default", "n1", A100=2), of("big", "n2", H100=2)], [second("r1")])
    made.apply([PoolSeen(CLOSED), PoolSeen(OPEN)])
    assert [one.shares[0].node_id for one in made.decide(1000).placements] == ["id-n2"]
    assert made.impossible(second("r2")) == ""


def test_22A1_warnings_name_principals_pools_and_the_command() -> None:
    assert sharing_warnings(principals=[], closed=["default"], shared=["big"]) == []
    shared, closed = sharing_warnings(principals=["bob"], closed=["default"], shared=["big"])
    assert golden("server.isolation.code-bob-can") in shared and golden("model.isolation.sgpu-pool-set") in shared
    assert (
        golden("model.isolation.runs-bob-wait") in closed and golden("server.isolation.sgpu-pool-set-default") in closed
    )
    (alone,) = sharing_warnings(principals=["bob"], closed=[], shared=[])
    assert golden("server.isolation.sgpu-pool-set-default") in alone


@pytest.mark.parametrize("named", ["default", ""])
def test_22A1_a_reserved_pool_lends_nothing_to_a_second_principal(named: str) -> None:
    made = planner([of("default", "n1", H100=2)], [second("r1", pool=named)])
    made.apply([PoolSeen(Pool(name="default", reserved=True, single_principal=True))])
    assert made.decide(1000).placements == ()
