"""Helpers of the tests of hangs that other tests use as well."""

from __future__ import annotations

import msgspec

from serverless_gpu.model.hangs.hang_detection import RankInspection
from serverless_gpu.model.hangs.stacks import Stack, Thread
from tests.support.model.stacks import frames

S = 1_000_000_000
Calls = tuple[tuple[str, int, str], ...]
HERE, THERE = (("/home/me/a.py", 1, "here"),), (("/home/me/a.py", 2, "there"),)


def stack(calls: Calls, *others: Calls) -> Stack:
    return Stack(Thread("Current", frames(*calls)), tuple(Thread("Thread", frames(*other)) for other in others))


def look(rank: int, calls: Calls = HERE, *others: Calls, **fields: object) -> RankInspection:
    made = RankInspection(rank=rank, pid=100 + rank, state="S", stack=stack(calls, *others))
    return msgspec.structs.replace(made, **fields)
