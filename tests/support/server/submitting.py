"""Helpers of the tests of submitting that other tests use as well."""

from __future__ import annotations

from typing import Any

import msgspec

from serverless_gpu.ambient import new_run_id
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.wire.runs import RunRequest, Target

ALICE = Caller(name="alice", role="member", teams=("search",), token_id="token-1")
BOB = Caller(name="bob", role="member")
LIVE = Target(machine="m1", python="3.11", platform="linux-x86_64")
CONTEXT = msgspec.Raw(b'{"environ":{"WANDB_API_KEY":"s3cret-value"}}')


def request(run_id: str = "", *, call: bytes | None = b"call", snapshot: str = "", **spec: Any) -> RunRequest:
    return RunRequest(
        id=run_id or new_run_id(),
        spec=RunSpec(remote=True, environment="snapshot" if snapshot else "live", **spec),
        target=LIVE,
        context=CONTEXT,
        call=call,
        snapshot=snapshot,
        version="0.1.0",
    )
