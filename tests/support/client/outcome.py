"""Helpers of the tests of outcome that other tests use as well."""

from __future__ import annotations

from serverless_gpu.model.lifecycle.attempt import MEANINGS, Failure, Reason
from serverless_gpu.node.base.protocol import Stopped

RUN = "01run"


def stopped(
    reason: Reason,
    detail: str = "",
    *,
    rank: int | None = None,
    cause: bool = True,
    consequences: tuple[Failure, ...] = (),
    log_tail: str = "",
) -> Stopped:
    return Stopped(
        state=MEANINGS[reason].state,
        reason=reason,
        cause=Failure(rank=rank, reason=reason, at_ns=1, detail=detail) if cause else None,
        consequences=consequences,
        log_tail=log_tail,
    )
