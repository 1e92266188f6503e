"""How many ranks a run with a Ray cluster has: one for each node, wherever they are counted."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest

from serverless_gpu.client.remote.event_stream import EventStream
from serverless_gpu.client.remote.remote_run import RemoteRun
from serverless_gpu.client.remote.server import RemoteServer
from serverless_gpu.model.spec import Command, RayCluster, Resources, RunSpec
from tests.support.client.remote_tracked import VIEW

RAY = RunSpec(ray=RayCluster(), resources=Resources(gpus=8))


@pytest.mark.parametrize(
    ("spec", "placed", "ranks"),
    [
        (RAY, 8, 1),
        (RAY, 0, None),  # before it is placed: one for each node
        (RunSpec(resources=Resources(gpus=8)), 8, 8),
        (RunSpec(resources=Resources(gpus=8)), 0, 8),
        (RunSpec(payload=Command(argv=("true",), per="node")), 8, 1),
    ],
)
def test_the_client_of_a_server_knows_how_many_results_come(
    tmp_path: Path, spec: RunSpec, placed: int, ranks: int | None
) -> None:
    view = msgspec.structs.replace(VIEW, spec=spec, world_size=placed, node="n1" if placed else "")
    assert RemoteRun(cast(RemoteServer, None), view, tmp_path, stream=cast(EventStream, None)).world_size == ranks
