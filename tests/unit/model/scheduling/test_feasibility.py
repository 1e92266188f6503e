"""Which runs no node could ever serve, and what some node could."""

from __future__ import annotations

import msgspec

from serverless_gpu.model.scheduling.feasibility import FeasibleRequest, shortage
from serverless_gpu.model.scheduling.values import Pool
from tests.support.golden import golden
from tests.support.model.asking import node, wanted

LAPTOP = node("laptop", CPU=4)
N1 = node("n1", H100=2, CPU=8)


def test_23B1_without_a_gpu_cpu_slots_are_offered() -> None:
    found = shortage([LAPTOP], [], wanted("r1", 1, gpu_type=None))
    assert found is not None
    assert (found.why, found.choices) == (golden("remote.feasibility.node-gpu"), (FeasibleRequest(gpu_type="CPU"),))


def test_23B1_fewer_devices_and_other_types_are_offered() -> None:
    found = shortage([N1], [], wanted("r1", 4, gpu_type="H100"))
    assert found is not None and found.choices == (FeasibleRequest(gpus=2), FeasibleRequest(gpu_type="CPU"))


def test_23B1_what_some_node_could_serve_is_possible_also_when_it_is_away() -> None:
    assert (
        shortage(
            [msgspec.structs.replace(N1, away="starts no new runs", total={"H100": 8})],
            [],
            wanted("r1", 8, gpu_type="H100"),
        )
        is None
    )


def test_23B1_a_reserved_pool_is_offered_by_name() -> None:
    there = msgspec.structs.replace(N1, pool="research")
    found = shortage([there], [Pool(name="research", reserved=True)], wanted("r1", 2, gpu_type="H100"))
    assert found is not None and found.choices == (FeasibleRequest(pool="research"),)
