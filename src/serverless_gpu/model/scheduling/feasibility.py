"""Could any of these nodes ever serve a run, and if none, which similar requests could they serve?

    nodes, pools, what a run wants ─▶ never served? ── no ──▶ None
                                          └── yes ─▶ Shortage: why · the same with another type, fewer devices, a pool

Pure: the server's admission decides with it whether a run is refused before it is queued (F82 is for runs that are).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.scheduling.impossible_requests import ELSEWHERE_REMEDY, NO_GPU_REMEDY, never_served
from serverless_gpu.model.scheduling.planner_state import PlannerState
from serverless_gpu.model.scheduling.values import Node, Pool, QueuedRun, QueuePolicy

CHOICES_MAX = 6


class FeasibleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that some node could serve; each field only where it differs from what was asked for."""

    gpus: int | None = None
    gpu_type: str | None = None
    pool: str = ""
    env: str = ""

    def changes(self) -> dict[str, int | str]:
        """Return what differs, by name of the option."""
        fields = {"gpus": self.gpus, "gpu_type": self.gpu_type, "pool": self.pool, "env": self.env}
        return {name: value for name, value in fields.items() if value}


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that could never serve a run."""

    why: str  # in words that name no option of a client
    choices: tuple[FeasibleRequest, ...] = ()  # similar requests that these nodes could serve, the most similar first


def shortage(nodes: Sequence[Node], pools: Iterable[Pool], wanted: QueuedRun) -> Shortage | None:
    """Return why none of these nodes could ever serve a run, or None when one could."""
    state = PlannerState(QueuePolicy())
    for pool in pools:
        state.floor.see_pool(pool)
    for node in nodes:
        state.floor.see(node)
    why = never_served(state, wanted, state.queue.ask(wanted))
    if not why:
        return None
    changed = ((choice, _changed(wanted, choice)) for choice in _similar(nodes, wanted))
    found = [choice for choice, similar in changed if not never_served(state, similar, state.queue.ask(similar))]
    return Shortage(why=why.removesuffix(NO_GPU_REMEDY).removesuffix(ELSEWHERE_REMEDY), choices=tuple(_best(found)))


def _similar(nodes: Sequence[Node], wanted: QueuedRun) -> Iterator[FeasibleRequest]:
    """Yield requests that differ in as little as possible; GPUs come before CPU slots."""
    pools = sorted({node.pool for node in nodes} - {wanted.pool, ""})
    types = sorted(
        {name for node in nodes for name, count in node.total.items() if count}, key=lambda name: (name == CPU, name)
    )
    sizes = sorted({count for node in nodes for count in node.total.values() if count}, reverse=True)
    fewer = [size for size in sizes if wanted.gpus is not None and size < wanted.gpus]
    others = [name for name in types if name != wanted.gpu_type]
    if wanted.machine:
        yield FeasibleRequest(env="snapshot")
    yield from (FeasibleRequest(pool=pool) for pool in pools)
    if wanted.gpu_type is not None:
        yield from (FeasibleRequest(gpus=size) for size in fewer)
    for name in others:
        yield FeasibleRequest(gpu_type=name)
        yield from (FeasibleRequest(gpu_type=name, gpus=size) for size in fewer)
    yield from (FeasibleRequest(gpu_type=name, pool=pool) for pool in pools for name in others)


def _changed(wanted: QueuedRun, choice: FeasibleRequest) -> QueuedRun:
    changes = choice.changes()
    if changes.pop("env", None):
        changes |= {"machine": ""}
    return msgspec.structs.replace(wanted, **changes)


def _best(choices: Iterable[FeasibleRequest]) -> Iterator[FeasibleRequest]:
    """Yield the first choice for each pool and type, with the largest number of devices; no pool and type where one is
    enough.
    """
    seen: set[tuple[str, str, str | None]] = set()
    for choice in choices:
        key = (choice.env, choice.pool, choice.gpu_type)
        is_double = bool(choice.pool and choice.gpu_type)
        simpler = {(choice.env, choice.pool, None), (choice.env, "", choice.gpu_type)} if is_double else set()
        if key not in seen and len(seen) < CHOICES_MAX and not seen & simpler:
            seen.add(key)
            yield choice


def like(wanted: QueuedRun) -> QueuedRun:
    """Return what a run wants without what makes no difference to whether it can ever be served."""
    return msgspec.structs.replace(
        wanted,
        run_id="",
        title="",
        queued_ns=0,
        not_before_ns=0,
        held="",
        avoid=frozenset(),
        expected_s=None,
        preemptions=0,
    )
