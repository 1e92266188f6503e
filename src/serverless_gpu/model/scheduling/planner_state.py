"""State of the planner between changes, and the results of its last pass."""

from __future__ import annotations

from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.scheduling.capacity import Capacity
from serverless_gpu.model.scheduling.fairness import Fairness
from serverless_gpu.model.scheduling.queue import Queue
from serverless_gpu.model.scheduling.request_shapes import TimedShape
from serverless_gpu.model.scheduling.values import DeviceShare, QueuePolicy, Reservation, RunningRun

_S = 1e9


class PlannerState:
    """Everything that waits and runs, and what it can run on."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy  # what the operator decides
        # `fairness`: who had how much.
        # `floor`: nodes, and who has what of them.
        self.queue, self.floor, self.fairness = Queue(), Capacity(policy), Fairness(policy)
        self.running: dict[str, RunningRun] = {}  # who has devices
        # What the last pass kept or promised, by run, in the order of the queue.
        self.reservations: dict[str, Reservation] = {}
        self.ended: list[RunningRun] = []  # who has given devices back since the last pass
        # Latest times that were told, and the devices: they stay over passes.
        self.promises: dict[str, Reservation] = {}
        # For whom others were asked to leave, and what is kept for each of them until it starts.
        self.clearing: dict[str, tuple[DeviceShare, ...]] = {}
        self.number = 0
        self.now_ns = 0  # the time of the last pass

    def set_policy(self, policy: QueuePolicy) -> None:
        """Decide otherwise from now on."""
        self.policy = policy
        self.fairness.set_policy(policy)
        self.floor.set_policy(policy)

    def begin(self, now_ns: int) -> None:
        """Begin a pass: what the last one kept is free again."""
        self.number += 1
        self.now_ns = now_ns
        self.fairness.settle(now_ns)
        for running in self.ended:
            size = sum(share.count for share in running.shares if share.gpu_type != CPU)
            self.floor.medians.note(size, max(0, now_ns - running.since_ns) / _S)
        self.ended.clear()
        self.queue.admit(now_ns)
        self.floor.close_books()
        self.reservations.clear()

    def guarded_ns(self, now_ns: int, *, times: int = 1) -> float:
        """Return since when somebody has to have waited to be next of all, or for several times as long."""
        return now_ns - times * self.policy.guard_s * _S

    def score(self, ask: TimedShape, queued_ns: int, now_ns: int) -> float:
        """Return how far ahead a run is among those of its user: by how long it has waited, small ones sooner.

        A gang waits the longer the more it needs, and each run let in before it makes it wait longer still; so its
        waiting counts less by the root of its size only, and more when it needs whole nodes, which are rarely free.
        """
        return (now_ns - queued_ns) / self.weight(ask)

    def weight(self, ask: TimedShape) -> float:
        """Return by what the waiting of a run is divided."""
        reach = self.floor.reach(ask.shape)
        if reach.weight is None:
            whole = self.policy.whole_node or reach.whole or 1
            count = ask.shape.gpus or reach.whole or 1
            reach.weight = float(count**0.5) / (self.policy.gang_lead if count >= whole else 1.0)
        return reach.weight

    def is_gang_of_nodes(self, ask: TimedShape) -> bool:
        """Return whether a run takes a whole node or more."""
        reach = self.floor.reach(ask.shape)
        return ask.shape.gpus is None or ask.shape.gpus >= (self.policy.whole_node or reach.whole)
