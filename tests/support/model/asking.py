"""Nodes, runs and planners of the tests, in few words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import (
    Arrived,
    Decision,
    DeviceShare,
    DevicesTaken,
    Node,
    NodeSeen,
    QueuedRun,
    QueuePolicy,
    RunningRun,
    Wait,
)
from serverless_gpu.model.scheduling.wait_messages import sentence

S = 1_000_000_000


def node(name: str, **devices: int) -> Node:
    """Return a node with these devices."""
    return Node(id=f"id-{name}", name=name, pool="default", machine=f"machine-{name}", total=devices)


def wanted(run_id: str, gpus: int | None = 1, gpu_type: str | None = "H100", **others: object) -> QueuedRun:
    """Return a run that has waited for as long as its number is small."""
    age = int("".join(letter for letter in run_id if letter.isdigit()) or 0)
    base = QueuedRun(run_id=run_id, title=f"alice/{run_id}", queued_ns=age, gpus=gpus, gpu_type=gpu_type)
    return msgspec.structs.replace(base, **others)


def busy(
    place: Node, count: int, title: str = "alice/bert-ft", gpu_type: str = "H100", **others: object
) -> tuple[Node, RunningRun]:
    """Return the node, and a run that has some of its devices."""
    run = wanted(f"held-{title}-{place.name}", count, gpu_type, **{"title": title, "queued_ns": 0, **others})
    return place, RunningRun(
        wanted=run, shares=(DeviceShare(node_id=place.id, gpu_type=gpu_type, count=count),), since_ns=0
    )


def planner(
    nodes: Iterable[Node | tuple[Node, RunningRun]], queue: Iterable[QueuedRun] = (), policy: QueuePolicy | None = None
) -> Planner:
    """Return a planner that knows of these."""
    made = Planner(policy)
    for entry in nodes:
        place, running = entry if isinstance(entry, tuple) else (entry, None)
        made.apply([NodeSeen(place), *([DevicesTaken(running)] if running is not None else [])])
    made.apply(Arrived(run) for run in queue)
    return made


class Decided:
    """What a planner decided at one time, and what it says of the others."""

    def __init__(self, made: Planner, now_ns: int = 1000) -> None:
        self.planner, self.now_ns = made, now_ns
        self.decision: Decision = made.decide(now_ns)

    def placed(self) -> dict[str, str]:
        """Return node by run, of those on one node; several are joined by ``+``."""
        return {
            placement.run_id: "+".join(share.node_id.removeprefix("id-") for share in placement.shares)
            for placement in self.decision.placements
        }

    def wait(self, run_id: str) -> Wait:
        """Return why a run waits."""
        wait = self.planner.why(run_id, self.now_ns)
        assert wait is not None
        return wait

    def said(self, run_id: str, clock: Callable[[int], str] = lambda ns: f"second {ns // S}") -> str:
        """Return the sentence of a run."""
        return sentence(self.wait(run_id), clock)


def decide(
    queue: Sequence[QueuedRun],
    nodes: Sequence[Node | tuple[Node, RunningRun]],
    now_ns: int = 1000,
    policy: QueuePolicy | None = None,
) -> Decided:
    """Return what a new planner decides."""
    return Decided(planner(nodes, queue, policy), now_ns)
