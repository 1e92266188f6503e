"""How many results a run has, as its view says."""

from __future__ import annotations

from msgspec.structs import replace

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import RayCluster, Resources, RunSpec
from serverless_gpu.wire.runs import CrewView
from tests.support.cli.waiting_shown import VIEW


def test_ranks_have_one_each_and_a_ray_cluster_one_for_each_node() -> None:
    assert VIEW.processes == 8
    asked = replace(VIEW, world_size=0, spec=RunSpec(resources=Resources(gpus=None)))
    assert asked.processes is None
    cluster = replace(VIEW, spec=replace(VIEW.spec, ray=RayCluster()))
    assert cluster.processes is None, "nobody knows on how many nodes it will be"
    assert replace(cluster, node="n1").processes == 1
    crews = tuple(CrewView(number=number, node=f"n{number}", state=State.RUNNING) for number in range(3))
    assert replace(cluster, node="n0, n1, n2", crews=crews).processes == 3
