"""What a run wants of the queue: whether it may have several nodes."""

from __future__ import annotations

from typing import Any

import pytest

from serverless_gpu.model.spec import Command, Kernel, Resources, RunSpec
from serverless_gpu.server.records import runs
from serverless_gpu.server.records.runs import NewRun, StoredRun
from serverless_gpu.server.scheduling import queue_snapshot
from serverless_gpu.wire.runs import Target


def stored(machine: str = "", *, gpus: int | None = 16, same_node: bool = False, **spec: Any) -> StoredRun:
    """Return a run as a server has it."""
    resources = Resources(gpus=gpus, gpu_type="H100", same_node=same_node)
    asked = RunSpec(remote=True, resources=resources, **{"environment": "snapshot", **spec})
    target = Target(machine=machine, caller="m1", python="3.11.7", platform="linux-x86_64")
    new = NewRun(
        id="r1", owner="alice", spec=asked, target=target, request_sha256="", context_sealed=b"", snapshot="0" * 64
    )
    return runs.described(new, at_ns=0)


@pytest.mark.parametrize(
    ("run", "several", "alone"),
    [
        (stored(), True, ""),
        (stored(payload=Command(argv=("torchrun", "x.py"), per="node")), True, ""),
        (stored(same_node=True), False, "without same_node=True"),
        (stored("m1", environment="live"), False, 'with env="snapshot"'),
        (stored(environment="live"), False, 'with env="snapshot"'),
        (stored(gpus=None), False, ""),
        (stored(payload=Kernel()), False, ""),
    ],
)
def test_who_may_have_several_nodes(run: StoredRun, several: bool, alone: str) -> None:
    found = queue_snapshot.queued_run(run, now_ns=0)
    assert (found.several_nodes, found.alone) == (several, alone)


def test_nodes_that_did_not_reach_each_other_are_kept_apart() -> None:
    past = queue_snapshot.Past(failed=frozenset({"n3"}), apart=frozenset({("n1", "n2")}))
    found = queue_snapshot.queued_run(stored(), past, now_ns=0)
    assert (found.avoid, found.apart) == (past.failed, past.apart)
