"""A planner, and a world that does what it decides: runs start, end, leave when they are asked to, and come again."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec

from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import (
    Arrived,
    Change,
    Decision,
    DeviceShare,
    DevicesTaken,
    Gone,
    Node,
    NodeSeen,
    Preemption,
    QueuedRun,
    QueuePolicy,
    RunningRun,
)

S = 1_000_000_000


class World:
    """A simulated pool. Time goes from event to event; nothing else happens in between.

    Args:
        nodes: what there is.
        policy: what the operator decided.
        leave_s: how long a run takes to leave.

    Attributes:
        planner: who decides.
        now_ns: the time.
        running: who has devices.
        waiting: who waits.
        started_ns: when each run got devices for the first time.
        preemptions: all of them, in order.
        on_end: called with each run that ended by itself.
        on_decision: called after each decision.
    """

    def __init__(self, nodes: Iterable[Node], policy: QueuePolicy | None = None, *, leave_s: float = 10.0) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.planner = Planner(policy)
        self.now_ns = 0
        self.running: dict[str, RunningRun] = {}
        self.waiting: dict[str, QueuedRun] = {}
        self.started_ns: dict[str, int] = {}
        self.preemptions: list[Preemption] = []
        self.on_end: Callable[[QueuedRun], None] = lambda _: None
        self.on_decision: Callable[[], None] = lambda: None
        self._gpu_s: dict[tuple[str, str], float] = defaultdict(float)
        self._leave_ns = round(leave_s * S)
        self._left_ns: dict[str, int] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._changes: list[Change] = [NodeSeen(node) for node in self.nodes.values()]
        self._number = 0

    def change(self, node: Node) -> None:
        """Have a node be another one than before."""
        self.nodes[node.id] = node
        self.tell(NodeSeen(node))

    def tell(self, *changes: Change) -> None:
        """Tell the planner at its next decision."""
        self._changes += changes

    def at(self, at_ns: int, call: Callable[[], None]) -> None:
        """Have something happen at a time."""
        self._number += 1
        heapq.heappush(self._events, (at_ns, self._number, call))

    def submit(self, wanted: QueuedRun, length_s: float, *, at_s: float = 0.0) -> None:
        """Let a run come at a time, or now if that is past; it needs its devices for so long in all."""
        self.at(max(self.now_ns, round(at_s * S)), lambda: self._arrive(wanted, round(length_s * S)))

    def decide(self) -> Decision:
        """Tell what has changed, ask, and do what is decided."""
        changes, self._changes = self._changes, []
        self.planner.apply(changes)
        decision = self.planner.decide(self.now_ns)
        for placement in decision.placements:
            self._start(placement.run_id, placement.shares)
        for preemption in decision.preemptions:
            self.preemptions.append(preemption)
            self._ask(preemption.run_id)
        self.on_decision()
        return decision

    def run(self, until_s: float) -> None:
        """Let time pass: what happens at one time is told together."""
        until_ns = round(until_s * S)
        decision = self.decide()
        while True:
            wakes = [] if decision.wake_ns is None else [decision.wake_ns]
            at_ns = min([*wakes, *([self._events[0][0]] if self._events else [])], default=until_ns)
            if at_ns > until_ns:
                break
            assert at_ns > self.now_ns or (self._events and self._events[0][0] == at_ns), "a wake-up that is past"
            self.now_ns = max(self.now_ns, at_ns)
            while self._events and self._events[0][0] <= self.now_ns:
                heapq.heappop(self._events)[2]()
            decision = self.decide()
            if at_ns == until_ns and not (self._events and self._events[0][0] <= until_ns):
                break
        self.now_ns = until_ns

    def used(self) -> dict[tuple[str, str], float]:
        """Return GPU-seconds by team and user, of those who run, too."""
        used = self._gpu_s.copy()
        for held in self.running.values():
            used[held.wanted.team, held.wanted.owner] += self._gpu_seconds(held)
        return used

    def free(self, node_id: str, gpu_type: str = "H100") -> int:
        """Return what nobody has of a node."""
        taken = sum(
            share.count
            for held in self.running.values()
            for share in held.shares
            if (share.node_id, share.gpu_type) == (node_id, gpu_type)
        )
        return self.nodes[node_id].total.get(gpu_type, 0) - taken

    def _arrive(self, wanted: QueuedRun, length_ns: int) -> None:
        self._left_ns[wanted.run_id] = length_ns
        queued = msgspec.structs.replace(wanted, queued_ns=self.now_ns)
        self.waiting[wanted.run_id] = queued
        self.tell(Arrived(queued))

    def _start(self, run_id: str, shares: tuple[DeviceShare, ...]) -> None:
        wanted = self.waiting.pop(run_id)
        self.started_ns.setdefault(run_id, self.now_ns)
        held = self.running[run_id] = RunningRun(wanted=wanted, shares=shares, since_ns=self.now_ns)
        self.at(self.now_ns + self._left_ns[run_id], lambda: self._end(held))

    def _ask(self, run_id: str) -> None:
        held = self.running[run_id]
        assert not held.is_leaving, f"{run_id} is asked twice"
        leaving = self.running[run_id] = msgspec.structs.replace(held, is_leaving=True)
        self.at(self.now_ns + self._leave_ns, lambda: self._leave(leaving))
        self.tell(DevicesTaken(leaving))

    def _end(self, held: RunningRun) -> None:
        run_id = held.wanted.run_id
        now = self.running.get(run_id)
        if now is not None and now.since_ns == held.since_ns:
            self._count(now)
            del self.running[run_id]
            self.tell(Gone(run_id))
            self.on_end(held.wanted)

    def _leave(self, held: RunningRun) -> None:
        """Let a run wait again: it goes on where it was."""
        run_id, wanted = held.wanted.run_id, held.wanted
        if self.running.get(run_id) is not held:
            return
        self._count(held)
        del self.running[run_id]
        self._left_ns[run_id] -= self.now_ns - held.since_ns
        again = self.waiting[run_id] = msgspec.structs.replace(wanted, preemptions=wanted.preemptions + 1)
        self.tell(Arrived(again))

    def _count(self, held: RunningRun) -> None:
        self._gpu_s[held.wanted.team, held.wanted.owner] += self._gpu_seconds(held)

    def _gpu_seconds(self, held: RunningRun) -> float:
        return sum(share.count for share in held.shares) * (self.now_ns - held.since_ns) / S
