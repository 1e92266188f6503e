"""State of the planner between changes: the queue, capacity, fairness, and the results of the last pass.

    class ─▶ team ─▶ user ─▶ line      a line: runs of one user that ask for the same, the oldest first

A pass compares heads of lines, never all that wait. Runs that are left alone until later wait beside the lines.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from weakref import WeakValueDictionary

from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.scheduling.capacity import Capacity
from serverless_gpu.model.scheduling.fairness import Fairness, team_of
from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    DeviceShare,
    Node,
    QueuedRun,
    QueuePolicy,
    Reservation,
    RunningRun,
)

_AGES_SPARE = 1000
_S = 1e9
LineKey = tuple[int, str, str, int]


class PlannerState:
    """Everything that waits and runs, and what it can run on."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy  # what the operator decides
        # `fairness`: who had how much.
        # `capacity`: nodes, and who has what of them.
        self.queue, self.capacity, self.fairness = Queue(), Capacity(policy), Fairness(policy)
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
        self.capacity.set_policy(policy)

    def begin(self, now_ns: int) -> None:
        """Begin a pass: what the last one kept is free again."""
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
        """Return since when a run has to have waited to be next of all, or for several times as long."""
        return now_ns - times * self.policy.guard_s * _S

    def score(self, ask: TimedShape, queued_ns: int, now_ns: int) -> float:
        """Return how far ahead a run is among those of its user: by how long it has waited, small ones sooner.

        A gang waits the longer the more it needs, and each run let in before it makes it wait longer still; so its
        waiting counts less by the root of its size only, and more when it needs whole nodes, which are rarely free.
        """
        return (now_ns - queued_ns) / self.weight(ask)

    def weight(self, ask: TimedShape) -> float:
        """Return by what the waiting of a run is divided."""
        reach = self.capacity.reach(ask.shape)
        if reach.weight is None:
            whole = self.policy.whole_node or reach.whole or 1
            count = ask.shape.gpus or reach.whole or 1
            reach.weight = float(count**0.5) / (self.policy.gang_lead if count >= whole else 1.0)
        return reach.weight

    def is_gang_of_nodes(self, ask: TimedShape) -> bool:
        """Return whether a run takes a whole node or more."""
        reach = self.capacity.reach(ask.shape)
        return ask.shape.gpus is None or ask.shape.gpus >= (self.policy.whole_node or reach.whole)


class QueueLine:
    """Runs of one user that ask for the same, the oldest first."""

    __slots__ = ("ask", "blocked", "key", "owner", "rows", "skipped", "team")

    def __init__(self, key: LineKey, ask: TimedShape) -> None:
        self.key, self.ask = key, ask
        _, self.team, self.owner, _ = key
        self.rows: list[tuple[int, str, QueuedRun]] = []  # since when each waits, its identifier, what it wants
        # `skipped`: those at the head that the pass under way has looked at; they stay.
        # `blocked`: as that of its ask, for those who can be told apart by whose they are.
        self.blocked = self.skipped = 0


Users = dict[str, list[QueueLine]]


class Queue:
    """Everything that waits."""

    def __init__(self) -> None:
        self.classes: dict[int, dict[str, Users]] = {}  # lines by class, team and user
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
        """Return what a run wants that waits, in a line or beside it."""
        entry = self._waiting.get(run_id)
        return self._held.get(run_id) if entry is None else entry[0]

    def where(self, run_id: str) -> tuple[QueuedRun, QueueLine | None] | None:
        """Return what a run wants that waits, and its line; None for the line when it waits beside them."""
        held = self._held.get(run_id)
        return self._waiting.get(run_id) if held is None else (held, None)

    def held(self) -> Iterator[QueuedRun]:
        """Return those that are left alone until later."""
        return iter(self._held.values())

    def put(self, wanted: QueuedRun) -> None:
        """Let a run wait, or wait for something else than before."""
        if self.find(wanted.run_id) == wanted:
            return
        self.remove(wanted.run_id)
        if wanted.not_before_ns > 0:
            self._held[wanted.run_id] = wanted
            heapq.heappush(self._later, (wanted.not_before_ns, wanted.run_id))
        else:
            self._line_up(wanted)

    def remove(self, run_id: str) -> QueuedRun | None:
        """Let a run wait no longer; return what it wanted."""
        entry = self._waiting.pop(run_id, None)
        if entry is None:
            return self._held.pop(run_id, None)
        wanted, line = entry
        del line.rows[bisect_left(line.rows, (wanted.queued_ns, run_id))]
        if not line.rows:
            self._close(line)
        return wanted

    def admit(self, now_ns: int) -> None:
        """Let those line up whose time has come."""
        while (at_ns := self.next_ns()) is not None and at_ns <= now_ns:
            _, run_id = heapq.heappop(self._later)
            self._line_up(self._held.pop(run_id))

    def next_ns(self) -> int | None:
        """Return when the next of those lines up who are left alone now."""
        while self._later:
            at_ns, run_id = self._later[0]
            wanted = self._held.get(run_id)
            if wanted is not None and wanted.not_before_ns == at_ns:
                return at_ns
            heapq.heappop(self._later)
        return None

    def oldest_ns(self) -> int | None:
        """Return since when the one waits in a line that has waited longest."""
        while self._ages:
            queued_ns, run_id = self._ages[0]
            entry = self._waiting.get(run_id)
            if entry is not None and entry[0].queued_ns == queued_ns:
                return queued_ns
            heapq.heappop(self._ages)
        return None

    def lines(self) -> Iterator[QueueLine]:
        """Return every line; none is empty."""
        return iter(self._lines.values())

    def ask(self, wanted: QueuedRun) -> TimedShape:
        """Return what a run asks for: one value for all that ask for the same."""
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


_LEARNED, _DECLARED = 1.5, 1.1
_MINUTES_MAX = 60
"""Runs share a line whose durations differ by less: a line has the exact ones of its head."""
_WALLS_MAX = 128


class Shape:
    """A request apart from its duration and its owner."""

    __slots__ = (
        "__weakref__",
        "blocked",
        "caller",
        "gpu_type",
        "gpus",
        "machine",
        "number",
        "platform",
        "pool",
        "python",
        "second_principal",
        "several",
        "tries",
        "unreserved",
        "walls",
        "walls_of",
    )

    def __init__(self, wanted: QueuedRun, number: int = -1) -> None:
        self.number = number  # its own; the capacity remembers by it what is in reach
        self.gpus, self.gpu_type, self.several = wanted.gpus, wanted.gpu_type, wanted.several_nodes
        self.pool, self.machine, self.platform = wanted.pool, wanted.machine, wanted.platform
        self.python, self.caller = wanted.python, wanted.caller if wanted.python else ""
        self.second_principal = wanted.second_principal
        # `unreserved`: number of the last pass in which it was found that nothing more is reserved for it.
        # `blocked`: number of the last pass in which it was found that nothing more of it fits, for any user.
        self.blocked = self.unreserved = self.walls_of = self.tries = 0
        # What was found not to fit in the pass `walls_of`: how long it would likely take, and at most; of two of which
        # one takes longer by both only the other is there, so one rises while the other falls.
        self.walls: list[tuple[float, float]] = []

    def needs(self, node: Node, gpu_type: str) -> int:
        """Return how many devices of a type it would take of a node: those it asks for, or all."""
        return node.total.get(gpu_type, 0) if self.gpus is None else self.gpus

    def is_walled(self, number: int, spans: tuple[float, float]) -> bool:
        """Return whether something that takes no longer was found not to fit in a pass."""
        if self.walls_of != number:
            return False
        at = bisect_right(self.walls, (spans[0], math.inf))
        return at > 0 and self.walls[at - 1][1] <= spans[1]

    def wall(self, number: int, spans: tuple[float, float]) -> None:
        """Note that something does not fit in a pass; when there are very many such, nothing more of the shape does."""
        if self.walls_of != number:
            self.walls_of, self.tries = number, 0
            self.walls.clear()
        at = bisect_right(self.walls, (spans[0], math.inf))
        last = at
        while last < len(self.walls) and self.walls[last][1] >= spans[1]:
            last += 1
        self.walls[at:last] = [spans]
        self.tries += 1
        if self.tries > _WALLS_MAX:
            self.blocked = number

    @staticmethod
    def key(wanted: QueuedRun) -> tuple[object, ...]:
        """Return what two runs of one shape have in common."""
        where = (wanted.pool, wanted.machine, wanted.platform, wanted.python, wanted.caller if wanted.python else "")
        return (wanted.gpus, wanted.gpu_type, wanted.several_nodes, where, wanted.second_principal)


class TimedShape:
    """A shape, and how long it is wanted: all that decides where a run may start, but for its owner."""

    __slots__ = ("__weakref__", "blocked", "expected_ns", "number", "shape")

    def __init__(self, wanted: QueuedRun, shape: Shape, number: int = -1) -> None:
        self.number, self.shape = number, shape
        # How long its devices are needed, as learned; infinite where nothing is known.
        self.expected_ns = math.inf if wanted.expected_s is None else rounded(wanted.expected_s, _LEARNED) * 1e9
        self.blocked = 0  # as that of its shape, for those who can be told apart by how long they run

    @staticmethod
    def key(wanted: QueuedRun, shape: Shape) -> tuple[object, ...]:
        """Return what two runs of one ask have in common."""
        expected_s = None if wanted.expected_s is None else rounded(wanted.expected_s, _LEARNED)
        limit_s = None if wanted.limit_s is None else rounded(wanted.limit_s, _DECLARED)
        is_lowest = wanted.priority == BEST_EFFORT
        minutes = 0  # decides whether a run may borrow, told apart as finely as pools' times of return usually are
        if is_lowest and not wanted.preemptible and wanted.limit_s is not None:
            minutes = min(_MINUTES_MAX, math.ceil((wanted.limit_s - wanted.beyond_s) / 60))
        return (shape.number, limit_s, expected_s, wanted.preemptible, wanted.grace_s, is_lowest, minutes)

    def spans(self, wanted: QueuedRun) -> tuple[float, float]:
        """Return how long one of its runs needs devices: likely, and at most; infinite where unknown."""
        limit_ns = math.inf if wanted.limit_s is None else wanted.limit_s * 1e9
        return min(self.expected_ns, limit_ns), limit_ns


def rounded(seconds: float, step: float) -> float:
    """Return a duration rounded up to one of few, so that runs of about the same length share a line."""
    if seconds <= 1:
        return 1.0
    return float(step ** math.ceil(math.log(seconds, step) - 1e-9))
