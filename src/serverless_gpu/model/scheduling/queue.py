"""The queue: waiting runs by class, then team, then user, then request.

    class ─▶ team ─▶ user ─▶ line      a line: runs of one user that ask for the same, the oldest first

A pass compares heads of lines, never all that wait. Runs that are left alone until later wait beside the lines.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from weakref import WeakValueDictionary

from serverless_gpu.model.scheduling.fairness import team_of
from serverless_gpu.model.scheduling.request_shapes import Shape, TimedShape
from serverless_gpu.model.scheduling.values import QueuedRun

_AGES_SPARE = 1000
LineKey = tuple[int, str, str, int]


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
