"""Request shapes: runs that want the same share one value, and what was found out for it."""

from __future__ import annotations

import math
from bisect import bisect_right

from serverless_gpu.model.scheduling.values import BEST_EFFORT, Node, QueuedRun

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
