"""Helpers of the tests of waiting shown that other tests use as well."""

from __future__ import annotations

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.wire.queue import HolderView, WaitView
from serverless_gpu.wire.runs import RunView

AT_NS = 1_900_000_000_000_000_000  # 17 March 2030, 17:46:40 at Greenwich
WAITING = WaitView(
    reason="capacity",
    count=8,
    gpu_type="H100",
    node="n3",
    free=5,
    holders=(HolderView(title="alice/bert-ft", count=3, until_ns=AT_NS, is_bound=True),),
    place=2,
    at_ns=AT_NS,
    is_bound=True,
)
VIEW = RunView(
    id="r1",
    name="train",
    state=State.QUEUED,
    reason=None,
    sentence="as the server has it",
    fence=0,
    owner="bob",
    team="",
    pool="",
    node="",
    gpu_type="H100",
    world_size=8,
    created_ns=AT_NS - 1,
    started_ns=None,
    ended_ns=None,
    stop=None,
    spec=RunSpec(resources=Resources(gpus=8, gpu_type="H100")),
    waiting=WAITING,
)
