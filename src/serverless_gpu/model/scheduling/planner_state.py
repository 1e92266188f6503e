"""Planner state: queue, capacity, fair-share accounts, and results of the last pass.

    class ─▶ team ─▶ user ─▶ line      a line: runs of one user with equal requests, the oldest first

A pass compares only the heads of queue lines instead of all waiting runs. Queue lines omit held runs, which may not
start yet.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from weakref import WeakValueDictionary

from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.scheduling.capacity import Capacity
from serverless_gpu.model.scheduling.fairness import Fairness, team_of
from serverless_gpu.model.scheduling.values import (
    DeviceShare,
    QueuedRun,
    QueuePolicy,
    Reservation,
    RunningRun,
    Shape,
    TimedShape,
)

_AGES_SPARE = 1000
_S = 1e9
LineKey = tuple[int, str, str, int]


class PlannerState:
    """State of the planner: all waiting and running runs, nodes and fair-share accounts."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy  # The operator's queue settings.
        # `fairness` stores the past usage of teams and users. `capacity` stores the nodes with their runs.
        self.queue, self.capacity, self.fairness = Queue(), Capacity(policy), Fairness(policy)
        self.running: dict[str, RunningRun] = {}  # Running runs with their devices, by run identifier.
        # Reservations of the last pass by run, in queue order.
        self.reservations: dict[str, Reservation] = {}
        self.ended: list[RunningRun] = []  # Runs that have released their devices since the last pass.
        # Announced latest start times with reserved devices, which the planner keeps between passes.
        self.promises: dict[str, Reservation] = {}
        # Runs for which the scheduler preempted other runs, each with the devices held for the run.
        self.clearing: dict[str, tuple[DeviceShare, ...]] = {}
        self.number = 0
        self.now_ns = 0  # Time of the last pass.

    def set_policy(self, policy: QueuePolicy) -> None:
        """Replace the queue policy for future decisions."""
        self.policy = policy
        self.fairness.set_policy(policy)
        self.capacity.set_policy(policy)

    def begin(self, now_ns: int) -> None:
        """Begin a pass, and discard the reservations of the last pass."""
        self.number += 1
        self.now_ns = now_ns
        self.fairness.settle(now_ns)
        for running in self.ended:
            size = sum(share.count for share in running.shares if share.gpu_type != CPU)
            self.capacity.medians.note(size, max(0, now_ns - running.since_ns) / _S)
        self.ended.clear()
        self.queue.admit(now_ns)
        self.capacity.close_books()
        self.reservations.clear()

    def guarded_ns(self, now_ns: int, *, times: int = 1) -> float:
        """Return the latest queue time of runs that have waited longer than `times` times the guard."""
        return now_ns - times * self.policy.guard_s * _S

    def score(self, ask: TimedShape, queued_ns: int, now_ns: int) -> float:
        """Return a run's priority among its user's runs: waiting time divided by weight.

        Large gangs wait longer, because each run that starts before the gang extends the wait. A gang's weight
        therefore grows only with the square root of its size. A gang of whole nodes has a lower weight, because whole
        nodes are rarely free.
        """
        return (now_ns - queued_ns) / self.weight(ask)

    def weight(self, ask: TimedShape) -> float:
        """Return the weight of a run, by which `score` divides the waiting time."""
        reach = self.capacity.reach(ask.shape)
        if reach.weight is None:
            whole = self.policy.whole_node or reach.whole or 1
            count = ask.shape.gpus or reach.whole or 1
            reach.weight = float(count**0.5) / (self.policy.gang_lead if count >= whole else 1.0)
        return reach.weight

    def is_gang_of_nodes(self, ask: TimedShape) -> bool:
        """Return True if a run needs a whole node or more."""
        reach = self.capacity.reach(ask.shape)
        return ask.shape.gpus is None or ask.shape.gpus >= (self.policy.whole_node or reach.whole)


class QueueLine:
    """Runs of one user with equal requests, the oldest first."""

    __slots__ = ("ask", "blocked", "key", "owner", "rows", "skipped", "team")

    def __init__(self, key: LineKey, ask: TimedShape) -> None:
        self.key, self.ask = key, ask
        _, self.team, self.owner, _ = key
        self.rows: list[tuple[int, str, QueuedRun]] = []  # Queue time, run identifier and request of each run.
        # `skipped`: number of leading runs of the line that the current pass examined but could not place. `blocked`:
        # variant of `TimedShape.blocked` for the line's owner.
        self.blocked = self.skipped = 0


Users = dict[str, list[QueueLine]]


class Queue:
    """All waiting runs."""

    def __init__(self) -> None:
        self.classes: dict[int, dict[str, Users]] = {}  # Queue lines by priority class, team and user.
        self._waiting: dict[str, tuple[QueuedRun, QueueLine]] = {}
        self._lines: dict[LineKey, QueueLine] = {}
        self._shapes: WeakValueDictionary[tuple[object, ...], Shape] = WeakValueDictionary()
        self._asks: WeakValueDictionary[tuple[object, ...], TimedShape] = WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._held: dict[str, QueuedRun] = {}
        self._later: list[tuple[int, str]] = []
        self._ages: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._held)

    def find(self, run_id: str) -> QueuedRun | None:
        """Return the request of a waiting run, from a queue line or the held runs."""
        entry = self._waiting.get(run_id)
        return self._held.get(run_id) if entry is None else entry[0]

    def where(self, run_id: str) -> tuple[QueuedRun, QueueLine | None] | None:
        """Return a waiting run's request and queue line. The queue line of a held run is None."""
        held = self._held.get(run_id)
        return self._waiting.get(run_id) if held is None else (held, None)

    def held(self) -> Iterator[QueuedRun]:
        """Return the held runs, which may not start yet."""
        return iter(self._held.values())

    def put(self, wanted: QueuedRun) -> None:
        """Add a waiting run to the queue, or replace its request."""
        if self.find(wanted.run_id) == wanted:
            return
        self.remove(wanted.run_id)
        if wanted.not_before_ns > 0:
            self._held[wanted.run_id] = wanted
            heapq.heappush(self._later, (wanted.not_before_ns, wanted.run_id))
        else:
            self._line_up(wanted)

    def remove(self, run_id: str) -> QueuedRun | None:
        """Remove a run from the queue, and return its request or None."""
        entry = self._waiting.pop(run_id, None)
        if entry is None:
            return self._held.pop(run_id, None)
        wanted, line = entry
        del line.rows[bisect_left(line.rows, (wanted.queued_ns, run_id))]
        if not line.rows:
            self._close(line)
        return wanted

    def admit(self, now_ns: int) -> None:
        """Move held runs into queue lines after their start delay."""
        while (at_ns := self.next_ns()) is not None and at_ns <= now_ns:
            _, run_id = heapq.heappop(self._later)
            self._line_up(self._held.pop(run_id))

    def next_ns(self) -> int | None:
        """Return the time at which the next held run enters a queue line."""
        while self._later:
            at_ns, run_id = self._later[0]
            wanted = self._held.get(run_id)
            if wanted is not None and wanted.not_before_ns == at_ns:
                return at_ns
            heapq.heappop(self._later)
        return None

    def oldest_ns(self) -> int | None:
        """Return the queue time of the oldest run in a queue line."""
        while self._ages:
            queued_ns, run_id = self._ages[0]
            entry = self._waiting.get(run_id)
            if entry is not None and entry[0].queued_ns == queued_ns:
                return queued_ns
            heapq.heappop(self._ages)
        return None

    def lines(self) -> Iterator[QueueLine]:
        """Return all queue lines, each with at least one run."""
        return iter(self._lines.values())

    def ask(self, wanted: QueuedRun) -> TimedShape:
        """Return the timed shape of a run. Runs with equal requests share one timed shape."""
        shape_key = Shape.key(wanted)
        shape = self._shapes.get(shape_key)
        if shape is None:
            shape = self._shapes[shape_key] = Shape(wanted, next(self._numbers))
        key = TimedShape.key(wanted, shape)
        ask = self._asks.get(key)
        if ask is None:
            ask = self._asks[key] = TimedShape(wanted, shape, next(self._numbers))
        return ask

    def _line_up(self, wanted: QueuedRun) -> None:
        ask, team = self.ask(wanted), team_of(wanted)
        key = (wanted.priority, team, wanted.owner, ask.number)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = QueueLine(key, ask)
            self.classes.setdefault(wanted.priority, {}).setdefault(team, {}).setdefault(wanted.owner, []).append(line)
        self._waiting[wanted.run_id] = (wanted, line)
        if len(self._ages) > 2 * len(self._waiting) + _AGES_SPARE:
            self._ages = [(entry[0].queued_ns, run_id) for run_id, entry in self._waiting.items()]
            heapq.heapify(self._ages)
        else:
            heapq.heappush(self._ages, (wanted.queued_ns, wanted.run_id))
        insort(line.rows, (wanted.queued_ns, wanted.run_id, wanted))

    def _close(self, line: QueueLine) -> None:
        priority, team, owner, _ = line.key
        del self._lines[line.key]
        users = self.classes[priority][team]
        users[owner].remove(line)
        if not users[owner]:
            del users[owner]
        if not users:
            del self.classes[priority][team]
