"""How long the scheduler takes to decide: 10,000 runs wait for 10,000 GPUs that are in use, and 100 things change.

In one row those that wait are of higher classes than those that run, and all of them may be stopped for others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import msgspec

from benchmarks.report import Row, Timing
from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import Arrived, Change, Gone, Node, NodeSeen, QueuedRun

_NS = 1_000_000_000
_NODES, _WAITING, _USERS, _TEAMS = 1250, 10_000, 200, 20
_FILLING = 4000
"""So many runs of the lowest class are more than there is room for."""
_BAR_MS = 50.0


class _Pool:
    """Nodes of 8, runs of 200 users in 20 teams, and a planner that knows them."""

    def __init__(self, *, declared: bool, preemptible: bool = False) -> None:
        self._chance, self._declared, self._numbers = random.Random(1), declared, 0
        self._preemptible, self._leaving, self._runs = preemptible, set[str](), dict[str, QueuedRun]()
        self.planner, self.now_ns = Planner(), 1000 * _NS
        self._nodes = [Node(id=f"n{i}", name=f"n{i:04}", total={"H100": 8}) for i in range(_NODES)]
        self._running: list[str] = []
        self.waiting: dict[str, QueuedRun] = {}
        self.planner.apply(NodeSeen(node) for node in self._nodes)
        while len(self.waiting) < _WAITING:
            self.planner.apply([self._comes() for _ in range(500)])
            self.decide()
            self.now_ns += 60 * _NS
        if preemptible:
            self.now_ns += 600 * _NS  # those that run have had their devices for long enough to be asked
            self.decide()

    def decide(self) -> None:
        """Decide, and remember who runs and who was asked to leave."""
        decision = self.planner.decide(self.now_ns)
        for placement in decision.placements:
            self._running.append(placement.run_id)
            self._runs[placement.run_id] = self.waiting.pop(placement.run_id)
        self._leaving.update(preemption.run_id for preemption in decision.preemptions)

    def changes(self) -> list[Change]:
        """Return what changes until the next tick: 45 end, 45 come, 10 nodes are otherwise; who was asked has left."""
        self.now_ns += 5 * _NS
        changes: list[Change] = []
        for run_id in sorted(self._leaving):
            run = self._runs.pop(run_id)
            self._running.remove(run_id)
            self.waiting[run_id] = msgspec.structs.replace(run, preemptions=run.preemptions + 1)
            changes.append(Arrived(self.waiting[run_id]))
        self._leaving.clear()
        for _ in range(45):
            changes.append(Gone(self._running.pop(self._chance.randrange(len(self._running)))))
            changes.append(self._comes())
        for _ in range(10):
            at = self._chance.randrange(_NODES)
            self._nodes[at] = msgspec.structs.replace(self._nodes[at], outside={"H100": self._chance.randrange(2)})
            changes.append(NodeSeen(self._nodes[at]))
        return changes

    def _comes(self) -> Arrived:
        self._numbers += 1
        chance, user = self._chance, self._chance.randrange(_USERS)
        gpus = chance.choices([1, 2, 4, 8, 16], [60, 10, 10, 16, 4])[0]
        run = QueuedRun(
            run_id=f"r{self._numbers:06}",
            title=f"u{user}/x",
            owner=f"u{user}",
            team=f"t{user % _TEAMS}",
            priority=self._priority(),
            queued_ns=self.now_ns,
            gpus=gpus,
            gpu_type="H100",
            several_nodes=gpus > 8,
            preemptible=self._preemptible,
            limit_s=chance.choice([3600.0, 14_400.0, 86_400.0, None]) if self._declared else None,
        )
        self.waiting[run.run_id] = run
        return Arrived(run)

    def _priority(self) -> int:
        if not self._preemptible:
            return self._chance.choices([0, 1, 2], [5, 80, 15])[0]
        return self._chance.choice([0, 1]) if self._numbers > _FILLING else 2

    def naive_ms(self) -> float:
        """Return how long it takes to sort everybody and try each shape once."""
        began = time.perf_counter()
        blocked: set[int | None] = set()
        for run in sorted(self.waiting.values(), key=lambda run: (run.priority, run.queued_ns, run.run_id)):
            if run.gpus not in blocked:
                blocked.add(run.gpus)
        return 1000 * (time.perf_counter() - began)

    def tick_ms(self) -> float:
        """Return how long it takes to take note of 100 changes, and to decide."""
        changes = self.changes()
        began = time.perf_counter()
        self.planner.apply(changes)
        self.decide()
        return 1000 * (time.perf_counter() - began)


def _decision(quick: bool, *, preemptible: bool) -> Row:
    """Decide again and again while things change."""
    plain, declared = (_Pool(declared=each, preemptible=preemptible) for each in (False, True))
    rounds = range(10 if quick else 40)
    ours, naive, told = [], [], []
    for _ in rounds:
        ours.append(plain.tick_ms())
        naive.append(plain.naive_ms())
        told.append(declared.tick_ms())
    found = Timing("ours, nobody declares a time", tuple(ours))
    return Row(
        name=f"scheduler decision: 10,000 queued {'preemptible ' * preemptible}runs, 10,000 GPUs, 100 changes",
        ours=found,
        against=(Timing("sort and one pass, nothing else", tuple(naive)),),
        bar=f"≤ {_BAR_MS:.0f} ms",
        met=found.median <= _BAR_MS,
        value=f"{found.median:.0f} ms",
        also=(Timing("three of four declare a timeout: reservations", tuple(told)),),
    )


ROWS: dict[str, Callable[[bool], Row]] = {
    "decision": partial(_decision, preemptible=False),
    "decision-preemptible": partial(_decision, preemptible=True),
}
