"""A planner that does what a test says and writes down what it is told."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import (
    Change,
    Decision,
    DeviceShare,
    Placement,
    Preemption,
    QueuePolicy,
    Reservation,
    Wait,
    WaitReason,
)


class Scripted(Planner):
    """Decides what it was given beforehand, in order; then nothing.

    Attributes:
        told: what it was told, one list for each time.
        decisions: what it will decide.
        waits: why runs wait, by run.
    """

    def __init__(self, policy: QueuePolicy | None = None) -> None:
        super().__init__(policy)
        self.policy = policy
        self.told: list[list[Change]] = []
        self.decisions: list[Decision] = []
        self.waits: dict[str, Wait] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        """Write it down."""
        self.told.append(list(changes))

    def decide(self, now_ns: int) -> Decision:
        """Return the next of what was given."""
        return self.decisions.pop(0) if self.decisions else decision()

    def why(self, run_id: str, now_ns: int) -> Wait | None:
        """Return what was given."""
        return self.waits.get(run_id)

    def reservations(self) -> tuple[Reservation, ...]:
        """Return nothing."""
        return ()


class Planners:
    """The scripted planners that a server makes, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Scripted] = []
        monkeypatch.setattr("serverless_gpu.server.scheduling.planner_state.Planner", self._make)

    @property
    def last(self) -> Scripted:
        """Return the one that is asked now."""
        return self.made[-1]

    def _make(self, policy: QueuePolicy) -> Scripted:
        self.made.append(Scripted(policy))
        return self.made[-1]


def decision(
    placements: Iterable[Placement] = (), preemptions: Iterable[Preemption] = (), wake_ns: int | None = None
) -> Decision:
    """Return a decision."""
    return Decision(placements=tuple(placements), preemptions=tuple(preemptions), wake_ns=wake_ns)


def placement(run_id: str, node_id: str, count: int = 2, gpu_type: str = "H100") -> Placement:
    """Return where a gang is to start."""
    return Placement(run_id=run_id, shares=(DeviceShare(node_id=node_id, gpu_type=gpu_type, count=count),))


def waiting(run_id: str, words: str = "", reason: WaitReason = WaitReason.CAPACITY, *, place: int = 0) -> Wait:
    """Return why a run waits."""
    return Wait(run_id=run_id, reason=reason, words=words, place=place)
