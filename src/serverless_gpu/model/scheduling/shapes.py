"""What can be wanted, whoever wants it: runs that want the same share one value, and what was found out for it."""

from __future__ import annotations

import math

from serverless_gpu.model.scheduling.values import BEST_EFFORT, Wanted

_GRID = 1.5


class Shape:
    """What is wanted, apart from how long and by whom.

    Attributes:
        number: its own; the floor remembers by it what is in reach.
        kind: those of one kind are in line for the same devices.
        blocked: number of the last pass in which it was found that nothing more of it fits, whoever asks.
        walls: what was found not to fit in the pass `walls_of`: how long it would likely take, and at most.
        unreserved: number of the last pass in which it was found that nothing more is reserved for it.
    """

    __slots__ = (
        "__weakref__",
        "blocked",
        "caller",
        "gpu_type",
        "gpus",
        "kind",
        "machine",
        "number",
        "platform",
        "pool",
        "python",
        "several",
        "unreserved",
        "walls",
        "walls_of",
    )

    def __init__(self, wanted: Wanted, number: int = -1) -> None:
        self.number = number
        self.gpus, self.gpu_type, self.several = wanted.gpus, wanted.gpu_type, wanted.several_nodes
        self.pool, self.machine, self.platform = wanted.pool, wanted.machine, wanted.platform
        self.python, self.caller = wanted.python, wanted.caller if wanted.python else ""
        self.kind = (wanted.gpu_type, wanted.pool, wanted.machine)
        self.blocked = self.unreserved = self.walls_of = 0
        self.walls: list[tuple[float, float]] = []

    @staticmethod
    def key(wanted: Wanted) -> tuple[object, ...]:
        """Return what two runs of one shape have in common."""
        where = (wanted.pool, wanted.machine, wanted.platform, wanted.python, wanted.caller if wanted.python else "")
        return (wanted.gpus, wanted.gpu_type, wanted.several_nodes, where)


class Ask:
    """A shape, and how long it is wanted: all that decides where a run may start, but for its owner.

    Attributes:
        likely_ns: how long its devices are needed, likely; infinite where nobody can say.
        limit_ns: the longest; infinite where there is none.
        can_leave: whether it may be stopped and goes on later.
        is_lowest: whether it is of the class to which a reserved pool's idle devices are lent.
        blocked: as that of its shape, for those who can be told apart by how long they run.
    """

    __slots__ = (
        "__weakref__",
        "blocked",
        "can_leave",
        "grace_s",
        "is_lowest",
        "likely_ns",
        "limit_ns",
        "number",
        "shape",
    )

    def __init__(self, wanted: Wanted, shape: Shape, number: int = -1) -> None:
        self.number, self.shape = number, shape
        self.limit_ns = math.inf if wanted.limit_s is None else wanted.limit_s * 1e9
        self.likely_ns = self.limit_ns
        if wanted.expected_s is not None:
            self.likely_ns = min(self.limit_ns, rounded(wanted.expected_s) * 1e9)
        self.can_leave, self.grace_s = wanted.preemptible, wanted.grace_s
        self.is_lowest = wanted.priority == BEST_EFFORT
        self.blocked = 0

    @staticmethod
    def key(wanted: Wanted, shape: Shape) -> tuple[object, ...]:
        """Return what two runs of one ask have in common."""
        expected_s = None if wanted.expected_s is None else rounded(wanted.expected_s)
        is_lowest = wanted.priority == BEST_EFFORT
        return (shape.number, wanted.limit_s, expected_s, wanted.preemptible, wanted.grace_s, is_lowest)


def rounded(seconds: float) -> float:
    """Return a learned duration rounded up to one of few, so that runs of about the same length share a line."""
    if seconds <= 1:
        return 1.0
    return float(_GRID ** math.ceil(math.log(seconds, _GRID) - 1e-9))
