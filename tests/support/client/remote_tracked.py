"""Helpers of the tests of remote tracked that other tests use as well."""

from __future__ import annotations

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.wire.runs import RunView

VIEW = RunView(
    id="01kaz5w8d3e4f5g6h7j8k9m0n1",
    name="train",
    state=State.RUNNING,
    reason=None,
    sentence="",
    fence=1,
    owner="ada",
    team="",
    pool="",
    node="n1",
    gpu_type="",
    world_size=1,
    created_ns=0,
    started_ns=None,
    ended_ns=None,
    stop=None,
    spec=RunSpec(),
)
